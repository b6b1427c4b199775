"""Draw the figures of README.md and how-it-works.md: `python tools/figures.py` writes docs/figures/*.svg.

Each figure has a light and a dark theme. A separate SVG file follows the system's theme; on the page, the theme
button selects it.
"""
import html
import math
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs/figures"
THEMES = {
    "light": {"back": "#fdfdfb", "raised": "#f3f3ef", "line": "#8b9098", "text": "#1d2126",
              "soft": "#5c636c", "blue": "#2f6fb3", "orange": "#c2691a", "green": "#2e8547",
              "purple": "#8a4fb0"},
    "dark": {"back": "#14171c", "raised": "#1d2128", "line": "#7b8390", "text": "#dfe3e8",
             "soft": "#9aa4b1", "blue": "#6ea8ec", "orange": "#e8a15c", "green": "#6cc588",
             "purple": "#c79be6"},
}
COLORS = ["blue", "orange", "green", "purple"]  # one per process, by rank


class Drawing:
    """An SVG figure, 720 pixels wide, in the colors of the theme."""

    def __init__(self, height: int) -> None:
        self.height = height
        self.parts: list[str] = []

    def shape(self, tag: str, **attributes: object) -> None:
        listed = " ".join(f'{name.removesuffix("_")}="{value}"' for name, value in attributes.items())
        self.parts.append(f"<{tag} {listed}/>")

    def text(self, x: float, y: float, text: str, css: str = "t", anchor: str = "middle") -> None:
        place = f'x="{x:g}" y="{y:g}" class="{css}" text-anchor="{anchor}"'
        self.parts.append(f"<text {place}>{html.escape(text)}</text>")

    def box(self, x: float, y: float, width: float, height: float, css: str = "box", round_: int = 6) -> None:
        self.shape("rect", x=f"{x:g}", y=f"{y:g}", width=f"{width:g}", height=f"{height:g}", rx=round_,
                   class_=css)

    def line(self, *points: tuple[float, float], css: str = "line") -> None:
        self.shape("polyline", points=" ".join(f"{x:g},{y:g}" for x, y in points), class_=css)

    def arrow(self, x: float, y: float, x_end: float, y_end: float, css: str = "line") -> None:
        """Draw an arrow whose head has the color of its line."""
        angle = math.atan2(y_end - y, x_end - x)
        head = [(x_end - 10 * math.cos(angle + turn), y_end - 10 * math.sin(angle + turn))
                for turn in (.4, -.4)]
        self.line((x, y), (x_end - 4 * math.cos(angle), y_end - 4 * math.sin(angle)), css=css)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x_end, y_end), *head])
        self.shape("polygon", points=points, class_=css.split()[0] + " head")

    def svg(self) -> str:
        rules = "".join(f".{name}{{stroke:var(--{name})}}"
                        f".{name}:is(.fill,.head,.t){{fill:var(--{name});stroke:none}}" for name in COLORS)
        light, dark = (";".join(f"--{name}:{value}" for name, value in theme.items())
                       for theme in THEMES.values())
        style = (f"svg{{{light};background:var(--back)}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
                 + RULES + rules)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {self.height}">\n'
                f"<style>{style}</style>\n" + "\n".join(self.parts) + "\n</svg>\n")


RULES = ("text{font:14px system-ui,sans-serif;fill:var(--text)}.small{font-size:12px;fill:var(--soft)}"
         ".strong{font-weight:600}.box{fill:var(--raised);stroke:var(--line)}"
         ".open{fill:none;stroke:var(--line)}.line{fill:none;stroke:var(--line);stroke-width:2}"
         ".ink{stroke:var(--text)}.head{fill:var(--line);stroke:none}"
         "polyline{fill:none;stroke-width:2}.thin{stroke-width:1.2}.bold{stroke-width:3.5}"
         ".dash{stroke-dasharray:5 4}.faint{opacity:.3}"
         ".on{fill:var(--back);stroke:none;font-weight:600}")


def ranks() -> Drawing:
    drawing = Drawing(215)
    for node in range(2):
        x = 15 + 350 * node
        drawing.box(x, 35, 340, 150)
        drawing.text(x + 170, 24, f"node {node}: one machine", "t strong")
        for local in range(2):
            rank = 2 * node + local
            left = x + 12 + 162 * local
            drawing.box(left, 48, 154, 84, f"fill {COLORS[rank]}")
            drawing.text(left + 77, 72, "process", "on")
            drawing.text(left + 77, 94, f"rank {rank}", "on")
            drawing.text(left + 77, 116, f"local rank {local}", "on")
            drawing.box(left, 140, 154, 32)
            drawing.text(left + 77, 161, f"device {local}")
    drawing.text(360, 206, "world size 4: all processes of the launch, on all nodes", "t small")
    return drawing


def dataparallel() -> Drawing:
    drawing = Drawing(285)
    drawing.box(15, 10, 690, 262, "open")
    drawing.text(30, 32, "one process, one Python thread per device", "t small", "start")
    drawing.box(35, 50, 190, 200, "fill blue")
    for row, line in enumerate(["device 0", "the batch", "the model", "all outputs, the loss",
                                "the sum of gradients"]):
        drawing.text(130, 80 + 36 * row, line, "on")
    for device, y in ((1, 50), (2, 160)):
        drawing.box(500, y, 190, 90, f"fill {COLORS[device]}")
        drawing.text(595, y + 26, f"device {device}", "on")
        drawing.text(595, y + 50, "a copy of the model,", "on")
        drawing.text(595, y + 72, "for this step only", "on")
        for row, (label, out) in enumerate([("1  its part of the batch", True), ("2  the whole model", True),
                                            ("3  its outputs", False), ("4  its gradients", False)]):
            height = y + 10 + 23 * row
            start, end = (232, 493) if out else (493, 232)
            drawing.arrow(start, height, end, height, css="line thin")
            drawing.text(362, height - 4, label, "t small")
    return drawing


def ring() -> Drawing:
    drawing = Drawing(300)
    places = [(60, 40), (460, 40), (460, 190), (60, 190)]
    for rank, (x, y) in enumerate(places):
        drawing.text(x, y - 8, f"rank {rank}", "t strong", "start")
        for chunk in range(4):
            sent = chunk == rank
            drawing.box(x + 50 * chunk, y, 46, 46, f"fill {COLORS[rank]}" + ("" if sent else " faint"), 4)
            drawing.text(x + 50 * chunk + 23, y + 28, "abcd"[chunk], "on" if sent else "t")
    drawing.arrow(268, 63, 450, 63, "blue")
    drawing.text(359, 54, "a", "t strong")
    drawing.arrow(558, 92, 558, 182, "orange")
    drawing.text(572, 140, "b", "t strong")
    drawing.arrow(450, 213, 268, 213, "green")
    drawing.text(359, 204, "c", "t strong")
    drawing.arrow(158, 182, 158, 92, "purple")
    drawing.text(144, 140, "d", "t strong")
    drawing.text(360, 128, "N − 1 steps add what arrives.", "t small")
    drawing.text(360, 146, "N − 1 steps pass on the sums.", "t small")
    drawing.text(360, 164, "Each process sends 1/N per step.", "t small")
    drawing.text(360, 278, "Each process sends 2 (N − 1)/N times the gradients' bytes: "
                           "less than twice for any N.")
    return drawing


def average() -> Drawing:
    drawing = Drawing(250)
    start = (60, 200)
    vectors = [(130, -155), (230, -30), (110, -60), (210, -105)]
    for rank, (dx, dy) in enumerate(vectors):
        drawing.arrow(*start, start[0] + dx, start[1] + dy, COLORS[rank])
        drawing.text(start[0] + dx + 8, start[1] + dy + 2, f"rank {rank}", f"t {COLORS[rank]}", "start")
    drawing.text(60, 232, "gradients of 16 samples each", "t small", "start")
    mean = [sum(part) / 4 for part in zip(*vectors, strict=True)]
    drawing.arrow(345, 130, 425, 130, "line bold")
    drawing.text(385, 118, "mean", "t strong")
    drawing.arrow(470, 200, 470 + mean[0], 200 + mean[1], "line bold")
    drawing.text(470 + mean[0], 185 + mean[1], "same on all ranks", "t strong")
    drawing.text(470, 232, "gradient of all 64 samples", "t small", "start")
    return drawing


def batchnorm() -> Drawing:
    drawing = Drawing(260)
    values = random.Random(7)
    rows = [[(values.gauss(0, 1), colour) for _ in range(8)] for colour in COLORS]
    shown = [(f"rank {rank}", row) for rank, row in enumerate(rows)]
    for number, (name, row) in enumerate([*shown, ("SyncBatchNorm", sum(rows, []))]):
        y = 30 + 44 * number + (14 if number == 4 else 0)
        drawing.text(20, y + 5, name, "t strong" if number == 4 else "t", "start")
        drawing.line((150, y), (700, y), css="line thin")
        for value, colour in row:
            drawing.shape("circle", cx=f"{425 + 105 * value:.0f}", cy=y, r=5, class_=f"fill {colour}")
        mean = 425 + 105 * sum(value for value, _ in row) / len(row)
        drawing.line((mean, y - 15), (mean, y + 15), css="ink bold")
    drawing.text(425, 254, "Values of one channel and the mean that is subtracted. "
                           "SyncBatchNorm uses one mean for all.", "t small")
    return drawing


def half() -> Drawing:
    drawing = Drawing(290)

    def at(power: float) -> float:
        return 120 + (power + 150) * 2.05

    formats = [("float32", -149, 128, "green"), ("bfloat16", -133, 128, "purple"),
               ("float16", -24, 16, "blue")]
    for row, (name, low, high, colour) in enumerate(formats):
        y = 24 + 38 * row
        drawing.text(20, y + 17, name, "t strong", "start")
        drawing.box(at(low), y, at(high) - at(low), 24, f"fill {colour}", 4)
    for power, label in [(-149, "2⁻¹⁴⁹"), (-24, "2⁻²⁴"), (16, "2¹⁶"), (128, "2¹²⁸")]:
        drawing.line((at(power), 140), (at(power), 148), css="line thin")
        drawing.text(at(power), 164, label, "t small")
    drawing.line((at(-149), 144), (at(128), 144), css="line thin")
    drawing.line((at(-24), 172), (at(-24), 262), css="line thin dash")
    for centre, css in ((-30, "orange"), (-14, "orange dash")):
        curve = [(at(power), 258 - 62 * math.exp(-((power - centre) / 9) ** 2))
                 for power in range(centre - 24, centre + 25)]
        drawing.line(*curve, css=css)
    drawing.arrow(at(-30), 186, at(-14), 186, "orange")
    drawing.text(at(-56), 236, "gradients", "t orange", "end")
    drawing.text(at(8), 236, "gradients × 2¹⁶", "t orange", "start")
    drawing.text(at(-27), 282, "Left of the dashed line, float16 rounds to 0.", "t small")
    return drawing


def accumulate() -> Drawing:
    drawing = Drawing(240)

    def row(y: int, name: str, sends: set[int]) -> None:
        drawing.text(15, y + 19, name, "t strong", "start")
        x = 110
        for micro_batch in range(4):
            drawing.box(x, y, 44, 28, "fill blue", 3)
            drawing.box(x + 46, y, 44, 28, "fill green", 3)
            drawing.text(x + 22, y + 19, "fwd", "on")
            drawing.text(x + 68, y + 19, "bwd", "on")
            x += 94
            if micro_batch in sends:
                drawing.box(x - 2, y, 34, 28, "fill orange", 3)
                drawing.text(x + 15, y + 19, "⇄", "on")
                x += 34
        drawing.box(x, y, 36, 28, "box", 3)
        drawing.text(x + 18, y + 19, "step", "t small")

    for process in range(2):
        row(26 + 34 * process, f"process {process}", {0, 1, 2, 3})
        row(136 + 34 * process, f"process {process}", {3})
    drawing.text(110, 16, "without no_sync(): DDP sends the gradients four times", "t small", "start")
    drawing.text(110, 126, "no_sync() around all but the last: DDP sends the accumulated gradients once", "t small",
                 "start")
    drawing.text(110, 228, "⇄ all-reduce", "t orange", "start")
    return drawing


def shares() -> Drawing:
    drawing = Drawing(222)
    order = [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]
    for row, (name, cells) in enumerate([("DistributedSampler", [*order, 4, 1]),
                                         ("… drop_last=True", order[:8]), ("range(rank, n, N)", order)]):
        y = 30 + 62 * row
        drawing.text(15, y + 24, name, "t strong", "start")
        for place, sample in enumerate(cells):
            repeated = place >= 10
            colour = COLORS[place % 4]
            drawing.box(180 + 44 * place, y, 40, 36, f"{'open' if repeated else 'fill'} {colour}", 4)
            drawing.text(200 + 44 * place, y + 24, str(sample), f"t {colour}" if repeated else "on")
        if row == 1:
            for place in (8, 9):
                drawing.box(180 + 44 * place, y, 40, 36, "open faint", 4)
                drawing.text(200 + 44 * place, y + 24, str(order[place]), "t faint")
    drawing.text(642, 20, "repeated", "t small")
    drawing.text(592, 82, "dropped", "t small")
    drawing.text(180, 212, "One color per process.", "t small", "start")
    return drawing


def which_script() -> Drawing:
    questions = [
        ("Do you only need to load pairs of images?", None),
        ("Is one device enough?", "train.py"),
        ("Is this a quick test with a second GPU?", "train_DP.py"),
        ("Do you start it from an IDE or a debugger?", "train_mp.py"),
        ("Is the batch too large for memory?", "train_grad_accum.py"),
        ("Can the job be stopped before it ends?", "train_elastic.py"),
        ("Is 16-bit arithmetic fast on your device?", "train_amp.py"),
    ]
    drawing = Drawing(515)
    y = 12
    for question, script in questions:
        drawing.box(15, y, 320, 34)
        drawing.text(175, y + 22, question)
        drawing.arrow(335, y + 17, 455, y + 17)
        drawing.text(390, y + 11, "yes", "t small")
        drawing.box(457, y, 248, 34, css=f"fill {COLORS[0]}" if script else "box")
        drawing.text(581, y + 22, script or "Does the GPU wait for the CPU?", "on" if script else "t")
        if not script:
            for x, answer, loader in ((507, "no", "loader.py"), (634, "yes", "loader_DALI.py")):
                drawing.arrow(x, y + 34, x, y + 62)
                drawing.text(x + 10, y + 53, answer, "t small", "start")
                drawing.box(x - len(loader) * 5, y + 64, len(loader) * 10, 34, f"fill {COLORS[1]}")
                drawing.text(x, y + 86, loader, "on")
        down = 116 if not script else 58
        drawing.arrow(175, y + 34, 175, y + down - 2)
        drawing.text(187, y + down // 2 + 22, "no", "t small", "start")
        y += down
    drawing.box(15, y - 1, 320, 30, f"fill {COLORS[0]}")
    drawing.text(175, y + 19, "train_DDP.py", "on")
    return drawing


def drawings() -> dict[str, str]:
    """Return the SVG text of every figure by name."""
    made = [ranks, dataparallel, ring, average, batchnorm, half, accumulate, shares, which_script]
    return {drawing.__name__.replace("_", "-"): drawing().svg() for drawing in made}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (FOLDER / f"{name}.svg").write_text(text)
