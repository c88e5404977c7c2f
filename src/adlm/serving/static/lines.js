// Where lines break. A run that goes on keeps the lines it began with, so that a word that comes moves its own line at
// most; a finished text is set as the browser sets it, and keeps those lines at every step.

const EM_PER_TOKEN = 2.15; // width of an average token with its space, in proportional type
const EM_PER_BYTE = 0.75;
const SLACK = 1.06; // lines that turn out longer than the average still fit

/** Width of a mask whose token is not known, in em. */
export const maskWidth = (start) => (start.longest === 1 ? EM_PER_BYTE : EM_PER_TOKEN) - 0.3;

/** First positions of lines for a run that begins, `width` em wide: known words by their length, masks by the average. */
export function guessLines(start, width) {
  const firsts = [0], average = maskWidth(start) + 0.3;
  let used = 0;
  start.texts.forEach((text, i) => {
    const wide = text === null ? average * SLACK : 0.48 * [...text].length;
    const mayBreak = text === null || /^\s/.test(text) || start.texts[i - 1] === null;
    if (i > 0 && ((used + wide > width && mayBreak) || /\n/.test(start.texts[i - 1] ?? ""))) {
      firsts.push(i);
      used = 0;
    }
    used += wide;
  });
  return firsts;
}

/** First positions of lines in a text that the browser has set: a line begins where a word stands lower than the one
 * before it. Several spans may be one word; a break inside it (a word longer than a line) is left to the line. */
export function measuredLines(spans, texts) {
  const firsts = [0];
  let top = null;
  spans.forEach((span, i) => {
    const rects = (span.querySelector("b, i") ?? span).getClientRects();
    if (!rects.length) return;
    const middle = (rects[0].top + rects[0].bottom) / 2;
    const after = /\n/.test(texts[i - 1] ?? "");
    if (top !== null && (after || (middle > top + rects[0].height / 2 && wordBegins(texts, i)))) {
      if (i > firsts.at(-1)) firsts.push(i);
    }
    top = middle;
  });
  return firsts;
}

const wordBegins = (texts, i) => /^\s/.test(texts[i] ?? "") || /\s$/.test(texts[i - 1] ?? "") || (texts[i] ?? "") === "";
