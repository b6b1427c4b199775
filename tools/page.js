"use strict"
// Shows two scripts side by side, or the blocks of chosen ideas in one script.
// tools/diffs.py aligns the lines of two scripts when the page is built.

const CONTEXT = 3 // unchanged lines to keep visible before and after a change
const byId = id => document.getElementById(id)
const {scripts, tags, table, pairs, traps, parts} = JSON.parse(byId("data").textContent)
const numberOf = Object.fromEntries(scripts.map((script, number) => [script.name, number]))
const FIRST = scripts.findIndex(script => script.parents.length) // the default: the first script that has a parent
const START = {left: numberOf[scripts[FIRST].parents[0]], right: FIRST, chosen: [], change: -1}
const narrow = matchMedia("(max-width: 60rem)")

let left, right // the numbers of the two scripts shown
let chosen = [] // the ideas whose blocks are shown, in one script; none: the page compares two scripts
let current = -1 // the index of the selected change, or -1
let unfolded = false
let scrollToIt = true
const hiddenTags = new Set() // the numbers of the tags whose blocks are hidden

for (const script of scripts) { // tagAt: the number of the tag of each line in a block
  script.tagAt = []
  for (const [first, last, tag] of script.blocks) {
    for (let line = first; line <= last; line++) script.tagAt[line] = tags.indexOf(tag)
  }
}

const stored = name => { try { return localStorage[name] } catch { return undefined } }
const store = (name, value) => { try { localStorage[name] = value } catch {} }
const escape = text => text.replace(/[&<>"]/g, mark => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[mark])
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`
const list = words => new Intl.ListFormat("en").format(words)
const say = text => { byId("live").textContent = text }

// ---------------------------------------------------------------- what to show

function readAddress() {
  const [, names, from, to, change] = decodeURIComponent(location.hash.slice(1))
    .match(/^(?:ideas=(.+?)|(.+?)\.\.\.(.+?))(?::(\d+))?$/) || []
  const chosen = names ? names.split("+") : []
  const [left, right] = names ? [scriptOf(chosen), scriptOf(chosen)] : [numberOf[from], numberOf[to]]
  return left >= 0 && right >= 0 ? {left, right, chosen, change: change ? change - 1 : -1} : null
}

// Returns the number of the first script that has blocks of all these ideas, or -1.
const scriptOf = wanted => scripts.findIndex(({blocks}) =>
  wanted.every(idea => blocks.some(([, , , ideas]) => ideas.includes(idea))))
const addressOf = wanted => wanted.length ? `#ideas=${wanted.join("+")}`
  : `#${scripts[left].name}...${scripts[right].name}`
const address = () => addressOf(chosen)
const isChild = (child, parent) => scripts[child].parents.includes(scripts[parent].name)

// Walks down both scripts and returns stretches: {kind: "same" | "change" | "doc", rows, reason, traps, parts}.
function stretches() {
  if (chosen.length) return blocksOfIdeas()
  const turned = left > right
  const [, , steps] = left === right ? [0, 0, [scripts[left].lines.length]]
    : pairs[turned ? `${right},${left}` : `${left},${right}`]
  const found = []
  let i = 0, j = 0, here
  const open = (kind, more) => found.push(here = {kind, rows: [], ...more})
  const both = (kind, from = [], to = []) => here.rows.push({kind, i: i++, j: j++, from, to})
  const settle = () => { // blank lines after a change are not part of it
    if (here.kind === "same") return
    const rows = []
    while (here.rows.length && "ALB".includes(here.rows.at(-1).kind)) rows.unshift(here.rows.pop())
    open("same", {rows})
  }
  open("same")
  for (const step of steps) {
    if (typeof step === "number") {
      settle()
      for (let n = 0; n < step; n++) both("=")
    } else if (step[0] === "g") {
      settle()
      open("change", {reason: step[1], traps: step[2], parts: step[3]})
    } else {
      const kind = step[0]
      if (here.kind === "same" && "arl".includes(kind)) open("doc")
      if (kind === "r") both("r", step[1], step[2])
      else if (kind === "B") both("B")
      else here.rows.push({kind, i: "lL".includes(kind) ? i++ : null, j: "aA".includes(kind) ? j++ : null})
    }
  }
  if (turned) {
    const other = {l: "a", a: "l", L: "A", A: "L"}
    for (const {rows} of found) for (const row of rows) {
      [row.i, row.j, row.from, row.to, row.kind] = [row.j, row.i, row.to, row.from, other[row.kind] || row.kind]
    }
  }
  for (const stretch of found) stretch.rows = stretch.rows.map(withoutHidden).filter(row => row.i !== null || row.j !== null)
  return found.filter(({rows}) => rows.length)
}

// Returns the stretches of one script; each block of a chosen idea is a change, and `meet` holds its chosen ideas.
function blocksOfIdeas() {
  const found = [], lines = sourceOf(left).split("\n")
  for (let line = 0; line < scripts[left].lines.length; line++) {
    const [first, , , ideas] = scripts[left].blocks.find(block => block[0] <= line && line <= block[1]) || []
    const meet = chosen.filter(idea => ideas?.includes(idea))
    const kind = meet.length ? "change" : "same"
    if (kind === "change" ? line === first : kind !== found.at(-1)?.kind) {
      found.push({kind, meet, rows: [], reason: lines[first]?.match(/: (.*)/)?.[1] ?? ""})
    }
    found.at(-1).rows.push({kind: "=", i: line, j: line})
  }
  return found
}

// Removes lines of hidden blocks from a row; the line on the other side stays.
function withoutHidden(row) {
  const gone = (number, line) => line !== null && hiddenTags.has(scripts[number].tagAt[line])
  const [noI, noJ] = [gone(left, row.i), gone(right, row.j)]
  if (!noI && !noJ) return row
  return {kind: noI ? "a" : "l", i: noI ? null : row.i, j: noJ ? null : row.j}
}

// ---------------------------------------------------------------- drawing

function codeOf(side, line) {
  return table[scripts[side ? right : left].lines[line]].replace(/<span class="co">(# new # [\w-]+)(.*?)<\/span>/,
    '<span class="marker"><b>$1</b></span><span class="reason">$2</span>')
}

function tagClass(side, line) {
  const tag = line === null ? undefined : scripts[side ? right : left].tagAt[line]
  return tag === undefined ? "" : ` t t${tag % 8}`
}

function numberCell(side, line, kind, only = "") {
  const word = {add: "added", del: "removed"}[kind]
  return `<td class="n s${side} ${kind} ${only}${tagClass(side, line)}">${line === null ? "" : line + 1}` +
    `${word ? `<span class="sr"> ${word}</span>` : ""}</td>`
}

function codeCell(side, line, kind, ranges) {
  if (line === null) return `<td class="c s${side} none"></td>`
  const code = codeOf(side, line)
  const indent = code.match(/^ */)[0].length
  const shown = (indent ? `<span class="indent">${" ".repeat(indent)}</span>` : "") +
    code.slice(indent).replace(/\.(?=[a-z_])/g, "<wbr>.").replace(/\((?!\))/g, "(<wbr>") // long lines may break there
  const marks = ranges && ranges.length ? ` data-parts="${ranges}"` : ""
  return `<td class="c s${side} ${kind}${tagClass(side, line)}"${indent ? ` style="--i:${indent}"` : ""}${marks}>${shown}</td>`
}

function splitRows(rows) {
  return rows.map(row => {
    const changed = "ral".includes(row.kind)
    const from = row.i === null ? "none" : changed ? "del" : ""
    const to = row.j === null ? "none" : changed ? "add" : ""
    return `<tr>${numberCell(0, row.i, from)}${codeCell(0, row.i, from, row.from)}` +
      `${numberCell(1, row.j, to)}${codeCell(1, row.j, to, row.to)}</tr>`
  })
}

function unifiedRows(rows) {
  const out = [], removed = [], added = []
  const line = (side, row, kind, ranges) => {
    const shown = side ? row.j : row.i
    const old = side && kind || left === right ? null : row.i
    out.push(`<tr>${numberCell(0, old, kind, "only")}${numberCell(1, side ? row.j : null, kind)}` +
      `${codeCell(side, shown, kind, ranges)}</tr>`)
  }
  const flush = () => {
    for (const row of removed.splice(0)) line(0, row, "del", row.from)
    for (const row of added.splice(0)) line(1, row, "add", row.to)
  }
  for (const row of rows) {
    if ("rl".includes(row.kind)) removed.push(row)
    if ("ra".includes(row.kind)) added.push(row)
    if ("=B".includes(row.kind) || (row.kind === "A" && !removed.length)) { flush(); line(1, row, "") }
    else if (row.kind === "A") added.push(row)
  }
  flush()
  return out
}

function notes(stretch, columns) {
  if (!stretch.traps?.length && !stretch.parts?.length) return ""
  const links = stretch.parts.map(id => `<p><span class="tag">How it works</span> <a href="#${id}">` +
    `${escape(parts[id])}</a></p>`)
  const pits = stretch.traps.map(name => `<details data-trap="${name}"><summary><span class="tag">Pitfall ${name}` +
    `</span> ${escape(traps[name])}</summary><div class="body"></div></details>`)
  return `<tr class="notes"><td colspan="${columns}"><div class="in">${links.join("")}${pits.join("")}</div></td></tr>`
}

function fold(rows, number, columns, render, before, after) {
  const keepFirst = before ? CONTEXT : 0, keepLast = after ? CONTEXT : 0
  const folded = rows.slice(keepFirst, rows.length - keepLast)
  const lines = folded.filter(row => "=".includes(row.kind)).length
  if (lines < 4 || left === right && !chosen.length) return `<tbody>${render(rows).join("")}</tbody>`
  const [first, last] = [folded[0], folded.at(-1)].map(row => (row.j ?? row.i) + 1)
  return `<tbody>${render(rows.slice(0, keepFirst)).join("")}</tbody>` +
    `<tbody class="fold"><tr><td colspan="${columns}"><button type="button" aria-expanded="${unfolded}"` +
    ` aria-controls="fold-${number}">⋯ ${plural(lines, chosen.length ? "other line" : "unchanged line")}` +
    `<span class="sr"> near line ${first} to ${last}</span></button></td></tr></tbody>` +
    `<tbody id="fold-${number}"${unfolded ? "" : " hidden"}>${render(folded).join("")}</tbody>` +
    `<tbody>${keepLast ? render(rows.slice(-keepLast)).join("") : ""}</tbody>`
}

function draw() {
  const unified = isUnified() || left === right
  const columns = unified ? 3 : 4
  const render = unified ? unifiedRows : splitRows
  const [from, to] = [scripts[left].name, scripts[right].name]
  const found = stretches()
  let changes = 0
  const body = found.map((stretch, number) => {
    if (stretch.kind === "same") {
      return fold(stretch.rows, number, columns, render, number > 0, number < found.length - 1)
    }
    if (stretch.kind === "doc") return `<tbody class="doc">${render(stretch.rows).join("")}</tbody>`
    const marked = [[left, right, "i"], [right, left, "j"]].some(([child, parent, side]) => isChild(child, parent) &&
      stretch.rows.some(row => row[side] !== null && /"co"># new #/.test(table[scripts[child].lines[row[side]]])))
    changes++
    const lines = kind => stretch.rows.filter(row => row.kind === kind).length
    const west = isChild(left, right) || (!isChild(right, left) && lines("l") > lines("a"))
    const meeting = stretch.meet?.length > 1
    const title = meeting ? `<tr><th colspan="${columns}" scope="rowgroup">${list(stretch.meet)} meet</th></tr>` : ""
    return `<tbody class="change${marked ? " new" : ""}${west ? " west" : ""}${meeting ? " meeting" : ""}"` +
      ` id="change-${changes}" tabindex="-1" data-reason="${escape(stretch.reason)}">${title}` +
      `${render(stretch.rows).join("")}${notes(stretch, columns)}</tbody>`
  }).join("")
  const head = unified
    ? `<col class="n"><col class="n"><col>|<th>${from}</th><th>${to}</th><th>code</th>`
    : `<col class="n"><col><col class="n"><col>|<th></th><th scope="col">${from}</th><th></th><th scope="col">${to}</th>`
  const [cols, heads] = head.split("|")
  const kind = `${unified ? "unified" : "split"}${isChild(left, right) ? " turned" : ""}${chosen.length ? " ideas" : ""}`
  byId("diff").innerHTML = `<table class="${kind}">` +
    `<caption class="sr">${left === right ? from : `${from} beside ${to}`}</caption><colgroup>${cols}</colgroup>` +
    `<thead${unified ? ' class="sr"' : ""}><tr>${heads}</tr></thead>${body}</table>`
  for (const cell of byId("diff").querySelectorAll("[data-parts]")) {
    const ranges = cell.dataset.parts.split(",").map(Number)
    for (let n = 0; n < ranges.length; n += 2) mark(cell, ranges[n], ranges[n + 1])
  }
  byId("split").setAttribute("aria-pressed", !isUnified())
  byId("unified").setAttribute("aria-pressed", isUnified())
  byId("unfold").hidden = !byId("diff").querySelector(".fold")
  drawIdeas()
  drawTags()
  drawHead(changes)
}

// Draws a button for each tag of the two scripts; it shows or hides the tag's blocks.
function drawTags() {
  const present = new Set([...scripts[left].tagAt, ...scripts[right].tagAt].filter(tag => tag !== undefined))
  byId("tags").hidden = !present.size || chosen.length
  byId("tags").innerHTML = "<span>Blocks</span>" + [...present].sort((a, b) => a - b).map(tag =>
    `<button type="button" class="t t${tag % 8}" data-tag="${tag}" aria-pressed="${!hiddenTags.has(tag)}">` +
    `${tags[tag]}</button>`).join("")
}

// Presses the chosen ideas' buttons, and disables those that no script combines with the chosen ones.
function drawIdeas() {
  for (const button of byId("ideas").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", chosen.includes(button.dataset.idea))
    button.disabled = scriptOf([...chosen, button.dataset.idea]) < 0
    button.title = button.disabled ? "no script combines it with the chosen ideas" : ""
  }
}

function toggleIdea(idea) {
  const all = [...byId("ideas").querySelectorAll("button")].map(button => button.dataset.idea)
  location.hash = addressOf(all.filter(one => chosen.includes(one) !== (one === idea)))
}

function toggleTag(tag) {
  if (!hiddenTags.delete(tag)) hiddenTags.add(tag)
  current = -1
  draw()
  byId("tags").querySelector(`[data-tag="${tag}"]`).focus()
  say(`${tags[tag]} blocks ${hiddenTags.has(tag) ? "hidden" : "shown"}`)
}

// Wraps the characters from `first` to `last` of a cell in <ins> or <del>, one text node at a time.
function mark(cell, first, last) {
  const tag = cell.classList.contains("add") ? "ins" : "del"
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT)
  const pieces = []
  for (let at = 0, node; (node = walker.nextNode()); at += node.length) {
    const begin = Math.max(first - at, 0), end = Math.min(last - at, node.length)
    if (begin < end) pieces.push([node, begin, end])
  }
  for (const [node, begin, end] of pieces) {
    const range = document.createRange()
    range.setStart(node, begin)
    range.setEnd(node, end)
    range.surroundContents(document.createElement(tag))
  }
}

function drawHead(changes) {
  const [from, to] = [scripts[left], scripts[right]]
  byId("left").value = from.name
  byId("right").value = to.name
  byId("copy-left").textContent = `Copy ${from.name}`
  byId("copy-right").textContent = `Copy ${to.name}`
  byId("copy-left").hidden = left === right
  const count = left === right ? 0 : pairs[left < right ? `${left},${right}` : `${right},${left}`][0]
  const places = `in ${plural(changes, "place")}`
  const meetings = document.querySelectorAll("#diff .meeting").length
  byId("head").innerHTML = chosen.length ? `<strong>${changes}</strong> ${changes === 1 ? "block" : "blocks"} of ` +
      `${list(chosen)} in ${to.name}. ` +
      (chosen.length > 1 ? `The ideas meet in <strong>${meetings || "none"}</strong> of them.` : "")
    : left === right ? `<strong>0</strong> changed lines: this is ${from.name} alone.`
    : isChild(right, left) || isChild(left, right)
      ? `<strong>${count}</strong> changed lines from ${from.name} to ${to.name}, ${places}. ` +
        "<small>Blank lines, comments and the docstring do not count.</small>"
      : `<strong>${count}</strong> changed lines from ${from.name} to ${to.name}, ${places}. ` +
        "<small>Neither is the other's parent: in each place the side with more lines counts; blank lines, comments " +
        "and the docstring do not.</small>"
  const link = byId("to-parent")
  link.hidden = !to.parents.length || to.parents.includes(from.name)
  link.href = `#${to.parents[0]}...${to.name}`
  link.textContent = `with its parent ${to.parents[0]}`
  drawPosition(changes)
}

function drawPosition(count = changeList().length) {
  const noun = chosen.length ? "block" : "change"
  byId("position").textContent = current < 0 ? plural(count, noun) : `${noun} ${current + 1} of ${count}`
  document.querySelector(".steps").hidden = !count
  document.querySelector(".switch").hidden = left === right
}

function show(choice) {
  ({left, right, chosen} = choice)
  current = -1
  draw()
  if (choice.change >= 0) step(choice.change, false)
}

// ---------------------------------------------------------------- stepping, folding, copying

const changeList = () => [...document.querySelectorAll("#diff .change")]
let view = stored("view") // the reader's choice; until then, the window's width decides
const isUnified = () => (view || (narrow.matches ? "unified" : "split")) === "unified"

function step(to, focus = true) {
  const changes = changeList()
  if (!changes.length) return
  changes[current]?.classList.remove("at")
  const wanted = to
  current = Math.min(Math.max(to, 0), changes.length - 1)
  const change = changes[current]
  change.classList.add("at")
  change.scrollIntoView({block: change.offsetHeight < innerHeight * 0.7 ? "center" : "start"})
  if (focus) change.focus({preventScroll: true})
  drawPosition(changes.length)
  const end = wanted < current ? ", the first" : wanted > current ? ", the last" : ""
  const reason = change.dataset.reason && `: ${change.dataset.reason}`
  say(`${chosen.length ? "block" : "change"} ${current + 1} of ${changes.length}${end}${reason}`)
  history.replaceState(null, "", `${address()}:${current + 1}`)
}

// Steps from the selected change if it is still visible, otherwise from the visible part of the page.
function move(by) {
  const changes = changeList()
  const box = changes[current]?.getBoundingClientRect()
  if (box && box.bottom > 0 && box.top < innerHeight) return step(current + by)
  const below = changes.findIndex(change => change.getBoundingClientRect().top > 60)
  step(below < 0 ? changes.length - (by < 0 ? 1 : 0) : by < 0 ? below - 1 : below)
}

function redraw() {
  const at = current
  draw()
  if (at >= 0) step(at, false)
}

function setView(chosen) {
  view = chosen
  store("view", view)
  redraw()
  say(view === "split" ? "side by side" : "unified")
}

function toggleFolds() {
  unfolded = !unfolded
  byId("unfold").setAttribute("aria-pressed", unfolded)
  for (const button of document.querySelectorAll("#diff .fold button")) setFold(button, unfolded)
  if (current >= 0) changeList()[current].scrollIntoView({block: "center"})
}

function setFold(button, open) {
  button.setAttribute("aria-expanded", open)
  byId(button.getAttribute("aria-controls")).hidden = !open
}

function sourceOf(number) {
  const holder = document.createElement("div")
  holder.innerHTML = scripts[number].lines.map(line => table[line]).join("\n")
  return holder.textContent + "\n"
}

async function copy(text, button, what) {
  try {
    await navigator.clipboard.writeText(text)
  } catch { // no permission, or an old browser
    const area = Object.assign(document.createElement("textarea"), {value: text})
    document.body.append(area)
    area.select()
    document.execCommand("copy")
    area.remove()
    button.focus()
  }
  if (button.textContent !== "Copied") button.dataset.label = button.textContent
  button.textContent = "Copied"
  setTimeout(() => { if (button.textContent === "Copied") button.textContent = button.dataset.label }, 1200)
  say(`copied ${what}`)
}

// ---------------------------------------------------------------- search

let index // of the pages: tools/search.py made it, and splits a text in the same way

function readIndex() {
  const {split, sections, weights} = JSON.parse(byId("index").textContent)
  index = {sections, weights: new Map(Object.entries(weights)), common: new Set(split.common)}
  for (const name of ["word", "part"]) index[name] = new RegExp(split[name], "g")
  for (const name of ["ending", "doubled", "chinese"]) index[name] = new RegExp(split[name])
}

function termsOf(text) {
  const found = []
  for (const [word] of text.matchAll(index.word)) {
    if (word >= "\u3400") { // Chinese: pairs of characters
      for (let at = 0; at < Math.max(word.length - 1, 1); at++) found.push(word.slice(at, at + 2))
      continue
    }
    const words = word.match(index.part) || []
    if (words.length > 1) found.push(word.toLowerCase())
    for (const part of words) found.push(part.toLowerCase().replace(index.ending, "").replace(index.doubled, "$1"))
  }
  return new Set(found.filter(term => !index.common.has(term)))
}

// Returns the numbers of the five sections with the greatest sums of weights, without the pages in the other language.
function search(text) {
  if (!index) readIndex()
  const scores = new Map()
  for (const term of termsOf(text)) {
    const weights = index.weights.get(term) || []
    for (let at = 0; at < weights.length; at += 2) {
      scores.set(weights[at], (scores.get(weights[at]) || 0) + weights[at + 1])
    }
  }
  const other = index.chinese.test(text) ? "en" : "zh"
  return [...scores].filter(([number]) => index.sections[number][2] !== other)
    .sort(([a, of_a], [b, of_b]) => of_b - of_a || a - b).slice(0, 5).map(([number]) => number)
}

function bestLine(lines, text) {
  const wanted = termsOf(text)
  const counts = lines.map(line => [...termsOf(line)].filter(term => wanted.has(term)).length)
  return lines[counts.indexOf(Math.max(...counts))]
}

function showResults() {
  const text = byId("query").value
  const found = search(text)
  byId("results").innerHTML = found.map(number => {
    const [targets, lines] = index.sections[number]
    const links = targets.map(([label, address]) => `<a href="${escape(address)}">${escape(label)}</a>`)
    return `<li><p>${links.join("; ")}</p><p>${escape(bestLine(lines, text))}</p></li>`
  }).join("")
  byId("found").textContent = found.length ? plural(found.length, "result")
    : text.trim() ? "No page has any of these words." : ""
}

byId("query").addEventListener("input", showResults)

// ---------------------------------------------------------------- user input

function choose() {
  scrollToIt = false
  location.hash = `#${byId("left").value}...${byId("right").value}`
}

byId("left").addEventListener("change", choose)
byId("right").addEventListener("change", choose)
byId("swap").addEventListener("click", () => {
  [byId("left").value, byId("right").value] = [byId("right").value, byId("left").value]
  choose()
})
byId("split").addEventListener("click", () => setView("split"))
byId("unified").addEventListener("click", () => setView("unified"))
byId("unfold").addEventListener("click", toggleFolds)
byId("previous").addEventListener("click", () => move(-1))
byId("next").addEventListener("click", () => move(1))
byId("copy-left").addEventListener("click", event => copy(sourceOf(left), event.target, scripts[left].name))
byId("copy-right").addEventListener("click", event => copy(sourceOf(right), event.target, scripts[right].name))

document.addEventListener("click", event => {
  const button = event.target.closest("button")
  if (button?.dataset.copy) copy(button.dataset.copy, button, "the command")
  if (button?.dataset.idea) toggleIdea(button.dataset.idea)
  if (button?.dataset.tag) toggleTag(+button.dataset.tag)
  if (button?.closest(".fold")) setFold(button, button.getAttribute("aria-expanded") !== "true")
  if (event.target.closest("a")?.hash === location.hash && readAddress()) arrive()
})

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("select, input, textarea")) return
  const act = {j: () => move(1), k: () => move(-1), f: toggleFolds,
    u: () => setView(isUnified() ? "split" : "unified"), "/": () => byId("query").focus()}[event.key]
  if (!act) return
  event.preventDefault()
  act()
})

// When the reader opens a pitfall beside a change, copies its text from the section Pitfalls.
document.addEventListener("toggle", event => {
  const body = event.target.querySelector?.(".body")
  if (!event.target.dataset?.trap || !event.target.open || body.childNodes.length) return
  const name = event.target.dataset.trap
  const [, ...content] = [...byId(name).children].map(child => child.cloneNode(true))
  body.append(...content)
  body.insertAdjacentHTML("beforeend", `<p><a href="#${name}">all pitfalls, from ${name}</a></p>`)
}, true)

// Selecting code with the mouse selects only one of the two scripts.
byId("diff").addEventListener("mousedown", event => {
  const cell = event.target.closest(".split .c")
  if (cell) cell.closest("table").className = cell.closest("table").className.replace(/ picked-\d|$/, "") +
    (cell.classList.contains("s0") ? " picked-0" : " picked-1")
})

// ---------------------------------------------------------------- theme and printing

const darkSystem = matchMedia("(prefers-color-scheme: dark)")

function drawTheme() {
  const dark = (document.documentElement.dataset.theme || (darkSystem.matches ? "dark" : "light")) === "dark"
  byId("theme").setAttribute("aria-pressed", dark)
  return dark
}

byId("theme").addEventListener("click", () => {
  const theme = drawTheme() ? "light" : "dark"
  document.documentElement.dataset.theme = theme
  store("theme", theme)
  drawTheme()
})
darkSystem.addEventListener("change", drawTheme)
narrow.addEventListener("change", redraw)

// Prints only the section that the reader is looking at.
addEventListener("beforeprint", () => {
  const middle = innerHeight / 2
  const section = [...document.querySelectorAll("main > section")]
    .find(part => part.getBoundingClientRect().bottom > middle)
  document.documentElement.dataset.reading = section?.id || "compare"
})
addEventListener("afterprint", () => { delete document.documentElement.dataset.reading })

// ---------------------------------------------------------------- the address

function arrive() {
  byId("compare").scrollIntoView()
  byId("compare-title").focus({preventScroll: true})
}

let clicked = false // a link scrolls to the comparison; back and forward restore the old position
document.addEventListener("click", event => { clicked = Boolean(event.target.closest("a")) }, true)

addEventListener("hashchange", () => {
  const choice = readAddress()
  const wanted = choice || (location.hash ? null : START)
  if (wanted) {
    if (wanted.left !== left || wanted.right !== right || wanted.change !== current
      || String(wanted.chosen) !== String(chosen)) show(wanted)
    if (choice && clicked && scrollToIt && choice.change < 0) arrive()
    say(byId("head").textContent)
  }
  clicked = false
  scrollToIt = true
})

drawTheme()
show(readAddress() || START)
if (readAddress() && readAddress().change < 0) arrive()
document.documentElement.dataset.ready = "yes"
