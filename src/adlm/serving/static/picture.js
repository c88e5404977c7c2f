// The canvas as an image: what the browser has laid out, drawn once more into pixels. Text stands still from frame to
// frame, so most pixels do too.

const RADIUS = 3;

/** ImageData of an element with `.line` blocks of cells, on its own background. */
export function drawLane(root) {
  const box = root.getBoundingClientRect();
  const pixels = new OffscreenCanvas(Math.ceil(box.width), Math.ceil(box.height)).getContext("2d", { willReadFrequently: true });
  const style = getComputedStyle(root);
  pixels.fillStyle = style.backgroundColor;
  pixels.fillRect(0, 0, box.width, box.height);
  pixels.font = `${style.fontSize} ${style.fontFamily}`;
  pixels.fontKerning = "none";
  pixels.letterSpacing = style.letterSpacing;
  pixels.textBaseline = "alphabetic";
  for (const mark of root.querySelectorAll("b, i.hole")) drawMark(pixels, mark, box);
  return pixels.getImageData(0, 0, pixels.canvas.width, pixels.canvas.height);
}

function drawMark(pixels, mark, box) {
  const style = getComputedStyle(mark);
  const label = mark.querySelector("em"), inner = label ? getComputedStyle(label) : style;
  for (const rect of mark.getClientRects()) {
    const [x, y] = [rect.left - box.left, rect.top - box.top];
    if (visible(style.backgroundColor)) {
      pixels.fillStyle = style.backgroundColor;
      pixels.beginPath();
      pixels.roundRect(x, y, rect.width, rect.height, RADIUS);
      pixels.fill();
    }
    const text = label ? label.textContent : mark.textContent;
    if (!visible(inner.color)) continue;
    const size = parseFloat(style.fontSize);
    const base = y + rect.height / 2 + size * 0.31;
    pixels.fillStyle = inner.color;
    const shift = label || mark.matches(".open") ? Math.max(0, (rect.width - pixels.measureText(text).width) / 2) : 0;
    pixels.fillText(text, x + shift, base);
    if (style.textDecorationLine === "underline") line(pixels, x, base + size * 0.2, rect.width, style.textDecorationColor);
    if (inner.textDecorationLine === "line-through") line(pixels, x, base - size * 0.28, rect.width, inner.color);
    return; // a word that is broken is drawn once, where it begins
  }
}

function line(pixels, x, y, width, colour) {
  pixels.fillStyle = colour;
  pixels.fillRect(x, y, width, 2);
}

const visible = (colour) => !/^rgba\(.*, 0\)$|^transparent$/.test(colour);
