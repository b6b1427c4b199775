const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true})
const known = {}
const rgba = colour => known[colour] ??= (() => {
  canvas.clearRect(0, 0, 1, 1)
  canvas.fillStyle = colour
  canvas.fillRect(0, 0, 1, 1)
  return [...canvas.getImageData(0, 0, 1, 1).data]
})()
const light = colour => [.2126, .7152, .0722].reduce((sum, weight, n) => {
  const part = colour[n] / 255
  return sum + weight * (part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
}, 0)
const worst = {}
for (const element of document.querySelectorAll("body *:not(script, style, noscript, svg *)")) {
  if (![...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue
  if (!element.checkVisibility() || element.closest(".sr, .skip, button:disabled")) continue
  let behind = element
  while (behind && rgba(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement
  const [a, b] = [light(rgba(getComputedStyle(element).color)),
                  light(rgba(getComputedStyle(behind ?? document.body).backgroundColor))]
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05)
  if (ratio < 4.5) worst[`${element.outerHTML.slice(0, 60)} in ${behind?.className}`] = ratio.toFixed(2)
}
return worst
