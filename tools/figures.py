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


def boxes() -> Drawing:
    drawing = Drawing(196)
    rows = [("its own number", [1 / 2] + [1 / 18] * 9), ("all boxes / 2", [1 / 10] * 10)]
    for row, (name, weights) in enumerate(rows):
        x, y = 180.0, 34 + 68 * row
        drawing.text(15, y + 17, "each divides by", "t", "start")
        drawing.text(15, y + 36, name, "t strong", "start")
        for box, weight in enumerate(weights):
            drawing.box(x, y, 520 * weight - 4, 46, f"fill {COLORS[box > 0]}", 4)
            if weight > 1 / 18:
                drawing.text(x + 260 * weight - 2, y + 28, f"1/{1 / weight:.0f}", "on")
            x += 520 * weight
    drawing.text(570, 96, "1/18 each", "t small")
    drawing.text(180, 22, "rank 0: one box", "t blue", "start")
    drawing.text(310, 22, "rank 1: nine boxes", "t orange", "start")
    drawing.text(180, 182, "The weight of each box in the averaged gradient.", "t small", "start")
    return drawing


def held() -> Drawing:
    drawing = Drawing(232)
    kinds = [("weights", "blue"), ("gradients", "orange"), ("optimizer state", "green")]
    for column, (name, whole) in enumerate([("DDP", 3), ("ZeRO-1", 2), ("FSDP2", 0)]):
        x = 85 + 215 * column
        drawing.text(x + 95, 20, name, "t strong")
        for rank in range(4):
            y = 32 + 38 * rank
            if not column:
                drawing.text(15, y + 21, f"rank {rank}", "t", "start")
            for number, (_, colour) in enumerate(kinds):
                left = x + 64 * number
                drawing.box(left, y, 60, 30, f"open {colour}", 3)
                first, width = (0.0, 60.0) if number < whole else (15.0 * rank, 15.0)
                drawing.box(left + first, y, width, 30, f"fill {colour}", 3)
    for number, (kind, colour) in enumerate(kinds):
        drawing.text(85 + 100 * number, 200, kind, f"t {colour}", "start")
    drawing.text(85, 222, "A filled part has memory on this rank.", "t small", "start")
    return drawing


def columns() -> Drawing:
    drawing = Drawing(232)
    for rank in range(2):
        y, colour = 36 + 92 * rank, COLORS[rank]
        drawing.text(15, y + 38, f"rank {rank}", "t strong", "start")
        drawing.box(80, y + 15, 62, 40, "box", 3)
        drawing.text(111, y + 40, "X")
        drawing.text(160, y + 40, "×")
        drawing.box(178, y, 110, 70, "open", 3)
        drawing.box(178 + 55 * rank, y, 55, 70, f"fill {colour}", 3)
        drawing.text(205 + 55 * rank, y + 40, f"A{rank}", "on")
        drawing.arrow(294, y + 35, 328, y + 35)
        drawing.box(334, y + 15, 55, 40, f"fill {colour}", 3)
        drawing.text(361, y + 40, f"H{rank}", "on")
        drawing.text(406, y + 40, "×")
        drawing.box(424, y, 62, 70, "open", 3)
        drawing.box(424, y + 35 * rank, 62, 35, f"fill {colour}", 3)
        drawing.text(455, y + 23 + 35 * rank, f"B{rank}", "on")
        drawing.arrow(492, y + 35, 526, y + 35)
        drawing.box(532, y + 15, 62, 40, f"open {colour}", 3)
        drawing.text(563, y + 40, f"Y{rank}", f"t {colour}")
        drawing.arrow(600, y + 35, 640, 117)
    drawing.box(642, 97, 68, 40, "box", 3)
    drawing.text(676, 122, "Y0 + Y1")
    for x, label in ((233, "columns of A"), (455, "rows of B"), (676, "all-reduce")):
        drawing.text(x, 22, label, "t small")
    drawing.text(15, 224, "Both ranks have all of X. Each computes its columns of H alone, and H needs no message.",
                 "t small", "start")
    return drawing


def pipeline() -> Drawing:
    drawing = Drawing(206)
    for stage in range(4):  # 1F1B, if each forward and each backward pass takes one slot of time
        y = 14 + 38 * stage
        drawing.text(15, y + 20, f"stage {stage}", "t strong", "start")
        drawing.box(84, y, 28 * 22, 30, "open faint", 3)
        for number in range(8):
            forward = stage + number * (1 if number < 4 - stage else 2)
            for slot, colour in ((forward, "blue"), (7 - stage + 2 * number, "green")):
                drawing.box(84 + 28 * slot, y, 27, 30, f"fill {colour}", 3)
                drawing.text(97 + 28 * slot, y + 20, str(number), "on")
    drawing.text(84, 190, "forward", "t blue", "start")
    drawing.text(150, 190, "backward", "t green", "start")
    drawing.text(700, 190, "8 micro-batches; each stage waits in 6 of 22 slots: 3 / (8 + 3)", "t small", "end")
    return drawing


def folder() -> Drawing:
    drawing = Drawing(226)
    drawing.box(300, 10, 250, 190, "open")
    drawing.text(315, 32, "step-0000044/", "t strong", "start")
    for rank in range(2):
        y = 46 + 50 * rank
        drawing.box(15, y, 150, 38, f"fill {COLORS[rank]}")
        drawing.text(90, y + 24, f"rank {rank}'s shards", "on")
        drawing.arrow(168, y + 19, 312, y + 19, COLORS[rank])
        drawing.text(240, y + 12, "1  write", "t small")
        drawing.box(315, y, 220, 38, f"open {COLORS[rank]}")
        drawing.text(425, y + 24, f"__{rank}_0.distcp")
    drawing.box(315, 150, 220, 38, "fill green")
    drawing.text(425, 174, ".metadata", "on")
    drawing.arrow(168, 169, 312, 169, "green")
    drawing.text(240, 162, "2  rename", "t small")
    drawing.text(90, 174, "rank 0, last")
    drawing.text(562, 174, "commits the folder", "t green", "start")
    drawing.text(15, 218, "A crash before step 2 leaves a folder without .metadata, which is ignored.", "t small",
                 "start")
    return drawing


def which_script() -> Drawing:
    pair = [(443, "no", "minimal/train.py"), (615, "yes", "minimal/train_DDP.py")]
    loaders = [(507, "no", "loader.py"), (634, "yes", "loader_DALI.py")]
    detectors = [(443, "no", "train_yolov3_DDP.py"), (622, "yes", "train_yolov3_amp.py")]
    shards = [(475, "no", "train_DCP.py"), (622, "yes", "train_FSDP.py")]
    questions: list[tuple[str, str, list[tuple[int, str, str]]]] = [
        ("Do you have a training loop to change?", "Are there several devices?", pair),
        ("Are pairs of images too many for one host?", "loader_streaming.py", []),
        ("Do you only need to load pairs of images?", "Does the GPU wait for the CPU?", loaders),
        ("Do you detect objects on one device?", "train_yolov3.py", []),
        ("Do you detect objects on several devices?", "Is 16-bit arithmetic fast on them?", detectors),
        ("Is one device enough?", "train.py", []),
        ("Is this a quick test with a second GPU?", "train_DP.py", []),
        ("Do you start it from an IDE or a debugger?", "train_mp.py", []),
        ("Is one layer too large for one device?", "train_TP.py", []),
        ("Is the model too large, and the links slow?", "train_PP.py", []),
        ("Is the model too large for one device?", "Can one host hold a checkpoint?", shards),
        ("Are two of the next three answers yes?", "train_combined.py", []),
        ("Is the batch too large for memory?", "train_grad_accum.py", []),
        ("Can the job be stopped before it ends?", "train_elastic.py", []),
        ("Is 16-bit arithmetic fast on your device?", "train_amp.py", []),
    ]
    drawing = Drawing(1153)
    y = 12
    for question, answer, scripts in questions:
        drawing.box(15, y, 320, 34)
        drawing.text(175, y + 22, question)
        drawing.arrow(335, y + 17, 455, y + 17)
        drawing.text(390, y + 11, "yes", "t small")
        drawing.box(457, y, 248, 34, css="box" if scripts else f"fill {COLORS[0]}")
        drawing.text(581, y + 22, answer, "t" if scripts else "on")
        for x, yes_or_no, script in scripts:
            start = max(x, 475)  # below the question's box
            drawing.arrow(start, y + 34, start, y + 62)
            drawing.text(start + 10, y + 53, yes_or_no, "t small", "start")
            drawing.box(x - len(script) * 4.5, y + 64, len(script) * 9, 34, f"fill {COLORS[1]}")
            drawing.text(x, y + 86, script, "on")
        down = 116 if scripts else 58
        drawing.arrow(175, y + 34, 175, y + down - 2)
        drawing.text(187, y + down // 2 + 22, "no", "t small", "start")
        y += down
    drawing.box(15, y - 1, 320, 30, f"fill {COLORS[0]}")
    drawing.text(175, y + 19, "train_DDP.py", "on")
    return drawing


def drawings() -> dict[str, str]:
    """Return the SVG text of every figure by name."""
    made = [ranks, dataparallel, ring, average, batchnorm, half, accumulate, shares, boxes, held,
            columns, pipeline, folder, which_script]
    return {drawing.__name__.replace("_", "-"): drawing().svg() for drawing in made}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (FOLDER / f"{name}.svg").write_text(text)
