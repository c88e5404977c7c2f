// Where lines break. A run that goes on keeps the lines it began with, so that a word that comes moves its own line at
// most; a finished text is set as the browser sets it, and keeps those lines at every step.

const EM_PER_TOKEN = 2.15; // width of an average token with its space, in proportional type
const EM_PER_BYTE = 0.75;
const SPREAD = 1.1; // standard deviation of that width
const SURE = 1.6; // standard deviations of a line that must still fit

/** Width of a mask whose token is not known, in em. */
export const maskWidth = (start) => (start.longest === 1 ? EM_PER_BYTE : EM_PER_TOKEN) - 0.3;

/** First positions of lines for a run that begins, `width` em wide: known words by their length, masks by the average. */
export function guessLines(start, width) {
  const firsts = [0], average = maskWidth(start) + 0.3;
  let used = 0, masks = 0;
  start.texts.forEach((text, i) => {
    const wide = text === null ? average : 0.5 * [...text].length;
    const mayBreak = text === null || /^\s/.test(text) || start.texts[i - 1] === null;
    const room = width - SURE * SPREAD * Math.sqrt(masks);
    if (i > 0 && ((used + wide > room && mayBreak) || /\n/.test(start.texts[i - 1] ?? ""))) {
      firsts.push(i);
      used = masks = 0;
    }
    used += wide;
    masks += text === null;
  });
  return firsts;
}

/** First positions of lines in a text that the browser has set: a line begins where a span stands lower than the one
 * before it. */
export function measuredLines(spans, texts) {
  const firsts = [0];
  let middle = null;
  spans.forEach((span, i) => {
    const [rect] = (span.querySelector("b") ?? span).getClientRects();
    if (!rect) return;
    const now = (rect.top + rect.bottom) / 2;
    if (middle !== null && (now > middle + rect.height / 2 || /\n/.test(texts[i - 1] ?? ""))) firsts.push(i);
    middle = now;
  });
  return firsts;
}
