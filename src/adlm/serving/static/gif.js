// An animated GIF (89a) from pictures of one size: one palette of the commonest colours, and of each picture only the
// rectangle that differs from the one before.

const BITS = 5; // of each colour channel that the palette tells apart
const TRANSPARENT = 255; // what has not changed

const bucket = (data, i) => ((data[i] >> 3) << 10) | ((data[i + 1] >> 3) << 5) | (data[i + 2] >> 3);

/** The commonest colours, and for each bucket of colours the nearest of them. */
function palette(pictures) {
  const counts = new Uint32Array(1 << (3 * BITS)), sums = new Float64Array(counts.length * 3);
  for (const { data } of pictures) {
    for (let i = 0; i < data.length; i += 4) {
      const b = bucket(data, i);
      counts[b]++;
      for (let c = 0; c < 3; c++) sums[3 * b + c] += data[i + c];
    }
  }
  const used = [...counts.keys()].filter((b) => counts[b]).sort((a, b) => counts[b] - counts[a]);
  const mean = (b) => [0, 1, 2].map((c) => sums[3 * b + c] / counts[b]);
  const colours = used.slice(0, TRANSPARENT).map(mean);
  const nearest = new Uint8Array(counts.length);
  for (const b of used) {
    const own = mean(b);
    let best = Infinity;
    colours.forEach((colour, index) => {
      const far = colour.reduce((sum, x, c) => sum + (x - own[c]) ** 2, 0);
      if (far < best) { best = far; nearest[b] = index; }
    });
  }
  return { colours, nearest };
}

/** The smallest rectangle outside which two index pictures are equal; one pixel where they are. */
function changedBox(now, before, width, height) {
  if (!before) return [0, 0, width, height];
  let [x0, y0, x1, y1] = [width, height, 0, 0];
  for (let i = 0; i < now.length; i++) {
    if (now[i] === before[i]) continue;
    const x = i % width, y = (i / width) | 0;
    x0 = Math.min(x0, x); x1 = Math.max(x1, x + 1);
    y0 = Math.min(y0, y); y1 = Math.max(y1, y + 1);
  }
  return x1 > x0 ? [x0, y0, x1 - x0, y1 - y0] : [0, 0, 1, 1];
}

/** LZW with codes of 8 bits to begin with, in blocks of at most 255 bytes. */
export function lzw(pixels) {
  const CLEAR = 256, END = 257, MOST = 4096;
  const bytes = [];
  let held = 0, bits = 0, size = 9, next = END + 1, known = new Map();
  const put = (code) => {
    held |= code << bits;
    bits += size;
    for (; bits >= 8; bits -= 8, held >>>= 8) bytes.push(held & 255);
  };
  put(CLEAR);
  let prefix = pixels[0];
  for (let i = 1; i < pixels.length; i++) {
    const key = (prefix << 8) | pixels[i];
    const code = known.get(key);
    if (code !== undefined) { prefix = code; continue; }
    put(prefix);
    if (next < MOST) {
      known.set(key, next);
      if (next === 1 << size && size < 12) size++;
      next++;
    } else {
      put(CLEAR);
      [size, next, known] = [9, END + 1, new Map()];
    }
    prefix = pixels[i];
  }
  put(prefix);
  put(END);
  if (bits) bytes.push(held & 255);
  const blocks = [8];
  for (let i = 0; i < bytes.length; i += 255) {
    const block = bytes.slice(i, i + 255);
    blocks.push(block.length, ...block);
  }
  blocks.push(0);
  return Uint8Array.from(blocks);
}

const word = (n) => [n & 255, n >> 8];
const ascii = (text) => [...text].map((c) => c.charCodeAt(0));

/** `milliseconds`: how long each picture stands. */
export function encodeGif(pictures, milliseconds) {
  const { width, height } = pictures[0];
  const { colours, nearest } = palette(pictures);
  const table = Array.from({ length: 256 }, (_, i) => (colours[i] ?? [0, 0, 0]).map(Math.round)).flat();
  const parts = [Uint8Array.from([...ascii("GIF89a"), ...word(width), ...word(height), 0xf7, 0, 0, ...table,
    0x21, 0xff, 11, ...ascii("NETSCAPE2.0"), 3, 1, 0, 0, 0])];
  let before = null;
  pictures.forEach(({ data }, n) => {
    const now = new Uint8Array(width * height);
    for (let i = 0; i < now.length; i++) now[i] = nearest[bucket(data, 4 * i)];
    const [x, y, w, h] = changedBox(now, before, width, height);
    const cut = new Uint8Array(w * h);
    for (let j = 0; j < h; j++) {
      for (let i = 0; i < w; i++) {
        const at = (y + j) * width + x + i;
        cut[j * w + i] = before && now[at] === before[at] ? TRANSPARENT : now[at];
      }
    }
    const delay = Math.max(2, Math.round(milliseconds[n] / 10));
    parts.push(Uint8Array.from([0x21, 0xf9, 4, 0x05, ...word(delay), TRANSPARENT, 0, 0x2c, ...word(x), ...word(y), ...word(w), ...word(h), 0]));
    parts.push(lzw(cut));
    before = now;
  });
  parts.push(Uint8Array.of(0x3b));
  return new Blob(parts, { type: "image/gif" });
}
