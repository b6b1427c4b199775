const [pairs, unified] = arguments, done = arguments[2]
const show = async () => {
  document.getElementById(unified ? "unified" : "split").click()
  const shown = []
  for (const [left, right] of pairs) {
    const wanted = `#${left}...${right}`
    if (location.hash !== wanted) {
      const changed = new Promise(then => addEventListener("hashchange", then, {once: true}))
      location.hash = wanted
      await changed
    }
    const rows = [...document.querySelectorAll("#diff tbody tr")].filter(row => row.querySelector(".n"))
    const number = cell => cell && parseInt(cell.textContent) || 0
    const text = cell => cell && !cell.classList.contains("none") ? cell.textContent : null
    shown.push({
      count: +document.querySelector("#head strong").textContent,
      blocks: [...document.querySelectorAll("#diff .new")].map(block => block.dataset.reason),
      changes: document.querySelectorAll("#diff .change").length,
      rows: rows.map(row => [
        number(row.querySelector(".n.s0")), text(row.querySelector(".c.s0")),
        number(row.querySelector(".n.s1")), text(row.querySelector(".c.s1")),
        row.querySelectorAll(".add, .del").length]),
    })
  }
  return shown
}
show().then(done, error => done(String(error)))
