// The playhead: follows a run while it is written, replays it afterwards, and stands still when asked to.

/** Milliseconds a frame is shown: the whole takes about nine seconds, no frame flashes by, none drags. */
export function pace(frames, speed = 1) {
  return Math.max(16, Math.min(140, 9000 / Math.max(1, frames))) / speed;
}

/**
 * hooks.show(k), hooks.changed({k, length, playing, live, end}); `end` is where the playhead will have arrived.
 * With `still()` true (reduced motion) a live run jumps to its newest frame and nothing is replayed by itself.
 */
export function makePlayer(hooks, still) {
  let k = 0, length = 0, expected = 1, playing = false, live = false, speed = 1, timer = null, shownAt = 0;

  const state = () => ({ k, length, playing, live, end: live ? Math.max(length, expected) : length });
  const report = () => hooks.changed(state());

  function put(next) {
    k = Math.max(0, Math.min(length, next));
    shownAt = performance.now();
    hooks.show(k);
    report();
  }

  function tick() {
    timer = null;
    if (!playing) return;
    if (k < length) {
      const gap = wait();
      const late = performance.now() - shownAt;
      // Several frames at once where the page cannot keep up, so that a replay takes the time it promises.
      put(k + Math.max(1, Math.min(8, Math.floor(late / gap))));
    }
    if (k >= length && !live) playing = false;
    if (playing && k < length) schedule();
    report();
  }

  // A live run is followed at most about a second behind; a finished one is played at its pace.
  const wait = () => pace(Math.max(expected, length), speed) / (live ? Math.max(1, (length - k) / 6) : 1);

  function schedule() {
    if (timer === null) timer = setTimeout(tick, wait());
  }

  return {
    /** A new run begins: `frames` is how many are expected. */
    begin(frames) {
      clearTimeout(timer);
      [k, length, expected, playing, live, timer] = [0, 0, frames, true, true, null];
      report();
    },
    /** A better idea of how many frames will come. */
    expect(frames) { expected = frames; },
    /** There are `n` frames now. */
    grow(n) {
      length = Math.max(length, n);
      if (playing && still()) put(length);
      else if (playing) schedule();
      report();
    },
    /** Nothing more will come. */
    end() {
      live = false;
      if (k >= length) playing = false;
      else if (playing) schedule();
      report();
    },
    go(next) {
      playing = false;
      put(next);
    },
    step(by) { this.go(k + by); },
    toggle() {
      playing = !playing;
      if (playing && k >= length && !live) put(0);
      if (playing) schedule();
      report();
    },
    speed(value) { speed = value; },
    pause() { playing = false; report(); },
    now: state,
  };
}
