"use strict";
// When everything happened in some steps, as lanes: what `driftless trace` writes.
{
  const COUNTS = [1, 2, 4, 8, 16, 32, 64];
  // Seconds after which a window that may have grown is asked for again.
  const AGAIN = 10;
  const TOP = 20;
  const TALLEST = 8000;
  // So many lanes are tall in any company.
  const FEW = 4;
  // Colour and name of each phase; those of engines are Fleet's.
  const OF_STEP = { step: ["--line", "step"], wait: ["--idle", "wait for answers"], learn: ["--good", "learn"], publish: ["--c1", "publish"], encode: ["--c4", "encode"], store: ["--c1", "store"] };
  const OF_ANSWER = { prefill: ["--c3", "queue and prefill"], decode: ["--c0", "decode, a shade for each version"], reward: ["--c6", "reward"] };
  const OF_VERSION = { see: ["--idle", "see"], sync: ["--c7", "sync"], fetch: ["--c5", "fetch"], decode: ["--c4", "decode the delta"], journal: ["--c1", "journal"], offer: ["--c2", "offer"], copy: ["--c6", "copy"], patch: ["--c3", "patch or load"] };
  const ROWS = { steps: OF_STEP, learner: OF_STEP, answers: OF_ANSWER, evaluations: OF_ANSWER, versions: OF_VERSION };
  const OTHER = { waits: ["--idle", "wait"], events: ["--bad", "event"] };

  function shadeOf(row, phase, version) {
    const [name, words] = ROWS[row]?.[phase] || OTHER[row] || [PHASES[phase] || "--c7", phase];
    const shades = ["", "c0", "90", "60"];
    const isDrawn = version !== null && version !== undefined && ROWS[row] === OF_ANSWER && phase === "decode";
    return { colour: D.css(name) + (isDrawn ? shades[version % 4] : ""), key: D.css(name), words };
  }

  // The parts of a bar: itself, where it has none.
  function partsOf(row, bar) {
    const only = bar.told?.versions?.length === 1 ? bar.told.versions[0] : null;
    if (bar.parts.length) return bar.parts.map(([phase, at, took, version]) => ({ phase, at, took, version: version ?? only }));
    return [{ phase: row === "steps" ? "step" : bar.name.split(" ")[0], at: bar.at, took: bar.took, version: only }];
  }

  // Where everything lies: headings and lanes from the top, with all colours looked up once.
  function layout(tracks) {
    const all = tracks.flatMap(({ rows }) => rows).reduce((sum, { lanes }) => sum + lanes.length, 0);
    const small = all > 300 ? 3 : all > 80 ? 6 : 13;
    const [places, legend] = [[], new Map()];
    let top = TOP;
    for (const track of tracks) {
      places.push({ top, tall: 20, heading: `${track.kind} ${track.name}`.trim() });
      top += 20;
      for (const row of track.rows) {
        places.push({ top, tall: 14, label: row.kind + (row.lanes.length > 1 ? `, at most ${row.lanes.length} at once` : "") });
        top += 14;
        const tall = row.lanes.length <= FEW ? 13 : small;
        for (const lane of row.lanes) {
          const bars = lane.map((bar) => ({ bar, row: row.kind, track, parts: partsOf(row.kind, bar).map((part) => {
            const { colour, key, words } = shadeOf(row.kind, part.phase, part.version);
            legend.set(words, key);
            return { ...part, colour, words };
          }) }));
          places.push({ top, tall, bars });
          top += tall + (tall > 3 ? 1 : 0);
        }
        top += 5;
      }
    }
    return { places, legend, tall: Math.min(top, TALLEST), isCut: top > TALLEST };
  }

  // Distances between marks that people count in, in microseconds.
  const TICKS = [...[0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((by) => by * 10 ** power)), ...[10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].map((seconds) => seconds * 1e6)];

  // A mark's time, with as many digits as tell it from the next.
  function stamp(us, step) {
    const digits = Math.min(Math.max(6 - Math.floor(Math.log10(step)), 0), 6);
    const minutes = Math.floor(us / 60e6);
    const seconds = (us / 1e6 - 60 * minutes).toFixed(digits);
    return minutes ? `+${minutes}:${seconds.padStart(digits ? digits + 3 : 2, "0")} min` : `+${seconds} s`;
  }

  function draw(canvas, made, [from, to], chosen) {
    const width = canvas.clientWidth;
    canvas.style.height = made.tall + "px";
    const ratio = Math.min(devicePixelRatio || 1, 16000 / made.tall);
    [canvas.width, canvas.height] = [width * ratio, made.tall * ratio];
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const x = (us) => ((us - from) / (to - from)) * width;
    const [ink, soft, line] = [D.css("--ink"), D.css("--soft"), D.css("--line")];
    pen.font = "11px system-ui, sans-serif";
    const least = ((to - from) / width) * 90;
    const step = TICKS.find((step) => step >= least) || least;
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      pen.fillStyle = line;
      pen.fillRect(x(at), TOP - 4, 1, made.tall);
      pen.fillStyle = soft;
      pen.fillText(stamp(at, step), x(at) + 3, 12);
    }
    for (const { top, tall, heading, label, bars } of made.places) {
      if (heading || label) {
        pen.fillStyle = heading ? ink : soft;
        pen.font = heading ? "600 12px system-ui, sans-serif" : "11px system-ui, sans-serif";
        pen.fillText(heading || label, 2, top + tall - 4);
        continue;
      }
      for (const one of bars) {
        if (one.bar.at > to || one.bar.at + one.bar.took < from) continue;
        for (const { at, took, colour } of one.parts) {
          const left = Math.max(x(at), -2);
          pen.fillStyle = colour;
          pen.fillRect(left, top, Math.max(Math.min(x(at + took), width + 2) - left - (one.row === "steps" ? 1 : 0), one.bar.took ? 0.6 : 3), tall);
        }
        if (one.row === "steps" && x(one.bar.took) - x(0) > 60) {
          pen.fillStyle = ink;
          pen.fillText(one.bar.name, Math.max(x(one.bar.at), 0) + 4, top + 10);
        }
        if (one === chosen) {
          pen.strokeStyle = ink;
          pen.lineWidth = 2;
          pen.strokeRect(x(one.bar.at), top, Math.max(x(one.bar.at + one.bar.took) - x(one.bar.at), 2), tall);
        }
      }
    }
  }

  // The bar under a point, or the nearest within a few pixels.
  function found(made, px, py, width, [from, to]) {
    const place = made.places.find(({ top, tall, bars }) => bars && py >= top && py < top + tall + 1);
    const at = from + (px / width) * (to - from);
    const near = ((to - from) / width) * 4;
    const away = ({ bar }) => Math.max(bar.at - at, at - bar.at - bar.took, 0);
    const bars = (place?.bars || []).filter((one) => away(one) <= near);
    return bars.length ? bars.reduce((one, other) => (away(other) < away(one) ? other : one)) : null;
  }

  const moment = (us) => D.time(us / 1000) + "." + String(Math.floor((us / 1000) % 1000)).padStart(3, "0");

  // What a bar is, in words.
  function said({ bar, row, track, parts }, from) {
    const whole = bar.took ? `${moment(from + bar.at)} to ${moment(from + bar.at + bar.took)}, ${D.span(bar.took / 1e6)}` : moment(from + bar.at);
    const version = (part) => (part.version === null || part.version === undefined ? "" : ` (version ${part.version})`);
    const within = bar.parts.length ? parts.map((part) => `${part.phase}${version(part)} ${D.span(part.took / 1e6)}`).join(", ") : "";
    const told = Object.entries(bar.told || {}).filter(([, value]) => value !== null && value !== "").map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "object" ? JSON.stringify(value) : value}`);
    const open = bar.position === null ? null : D.el("button", { onclick: () => D.choose({ position: bar.position, step: bar.told?.step, kind: row === "evaluations" ? "evaluation" : "" }, "samples") }, "open the answer");
    return [D.el("b", null, D.visible(bar.name)), D.visible([` ${track.kind} ${track.name}`.trimEnd(), whole, within, told.join(", ")].filter(Boolean).join(" · ")), open].flat().filter(Boolean);
  }

  D.views.time = {
    open(main) {
      this.asked = "";
      this.made = this.chosen = null;
      this.controls = D.el("div", { className: "controls" });
      this.told = D.el("p", { className: "told", role: "status" });
      this.legend = D.el("p", { className: "legend" });
      this.notes = D.el("div");
      this.canvas = D.el("canvas", { className: "timeline", tabIndex: 0 });
      this.canvas.setAttribute("aria-label", "what happened when; j and k go through it");
      main.append(D.el("div", { className: "above" }, this.controls, this.told), this.legend, this.notes, this.canvas);
      new ResizeObserver(() => this.draw()).observe(this.legend);
      this.point();
    },
    async tick(_, query) {
      const run = D.run();
      const ask = { run, step: query.step, steps: query.steps };
      const grows = query.step || D.exported ? "" : [D.runs[run]?.steps, Math.floor(Date.now() / 1000 / AGAIN)];
      const now = JSON.stringify([ask, grows]);
      if (now === this.asked) return;
      const window = await D.get("time", ask);
      const same = this.window && JSON.stringify([run, window.shown]) === this.shown;
      this.asked = now;
      this.shown = JSON.stringify([run, window.shown]);
      const wasWhole = !same || this.isWhole();
      [this.window, this.made, this.chosen] = [window, layout(window.tracks), null];
      if (wasWhole) this.view = [0, Math.max(window.for_us, 1)];
      this.bar(query);
      const marks = [...this.made.legend].map(([words, colour]) => {
        const dot = D.el("i", { className: "dot" });
        dot.style.backgroundColor = colour;
        return D.el("span", { className: "key" }, dot, words);
      });
      this.legend.replaceChildren(...marks);
      const notes = [window.cut || this.made.isCut ? "More happened than is drawn: choose fewer steps, or write all of it with `driftless trace`." : null,
        window.untimed ? `${window.untimed} answers are not drawn: the log does not say when they were under way.` : null, window.unread ? `No answers: ${window.unread}` : null,
        window.tracks.length ? null : "Nothing has happened yet that the files tell of."];
      this.notes.replaceChildren(...notes.filter(Boolean).map(D.note));
      this.say();
      this.draw();
    },
    isWhole() {
      return this.view[0] <= 0 && this.view[1] >= this.window.for_us;
    },
    bar(query) {
      const { steps, shown } = this.window;
      const button = (label, text, act, disabled) => D.el("button", { "aria-label": label, title: label, disabled, onclick: act }, text);
      const [first, last] = steps || [0, 0];
      const [from, to] = shown || [0, 0];
      const count = Number(query.steps) || 4;
      const go = (step) => D.choose({ step: step >= last ? "" : Math.max(step, first) });
      const options = COUNTS.map((number) => D.el("option", { value: number, selected: number === count }, number === 1 ? "1 step" : number + " steps"));
      const choice = D.exported || !steps ? null : D.el("span", { className: "stepper" }, button("earlier steps", "‹", () => go(to - count), from <= first),
        D.el("label", null, "to step ", D.el("input", { type: "number", min: first, max: last, value: to, onchange: (event) => go(Number(event.target.value)) })),
        button("later steps", "›", () => go(to + count), to >= last), D.el("select", { "aria-label": "how many", onchange: (event) => D.choose({ steps: event.target.value }) }, options));
      const zoom = D.el("span", { className: "stepper" }, button("left", "←", () => this.pan(-0.5)), button("right", "→", () => this.pan(0.5)), button("nearer", "+", () => this.zoom(0.5)), button("farther", "−", () => this.zoom(2)), button("all", "all", () => this.zoom(Infinity)));
      const words = shown ? `steps ${from}–${to}, from ${moment(this.window.from_us)}` : "";
      this.controls.replaceChildren(...[D.runChoice(), choice, zoom, D.el("span", { className: "hint" }, words + " · drag, ← → + − 0; j and k go through bars")].filter(Boolean));
    },
    pan(share) {
      const [from, to] = this.view;
      this.see(from + share * (to - from), to - from);
    },
    zoom(by) {
      const [from, to] = this.view;
      const long = Math.max((to - from) * by, 100);
      this.see((from + to - long) / 2, long);
    },
    see(from, long) {
      const whole = Math.max(this.window.for_us, 1);
      const size = Math.min(long, whole);
      const begin = Math.min(Math.max(from, 0), whole - size) || 0;
      this.view = [begin, begin + size];
      this.draw();
    },
    draw() {
      if (this.made && this.canvas.isConnected) draw(this.canvas, this.made, this.view, this.chosen);
    },
    say(one) {
      this.chosen = one || null;
      this.told.replaceChildren(...(one ? said(one, this.window.from_us) : ["Point at a bar: it says what it is, and when it was."]));
    },
    point() {
      let drag = null;
      const canvas = this.canvas;
      canvas.addEventListener("pointerdown", (event) => {
        drag = { x: event.offsetX, from: this.view?.[0] };
        canvas.setPointerCapture(event.pointerId);
      });
      for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (drag = null));
      canvas.addEventListener("pointermove", (event) => {
        if (!this.made) return;
        const [from, to] = this.view;
        if (drag) return this.see(drag.from - ((event.offsetX - drag.x) / canvas.clientWidth) * (to - from), to - from);
        const one = found(this.made, event.offsetX, event.offsetY, canvas.clientWidth, this.view);
        if (one && one !== this.chosen) this.say(one), this.draw();
      });
      canvas.addEventListener("click", (event) => {
        const one = this.made && found(this.made, event.offsetX, event.offsetY, canvas.clientWidth, this.view);
        if (one) this.say(one), this.draw();
      });
    },
    key(event) {
      if (!this.made) return;
      const act = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.zoom(Infinity) }[event.key];
      const by = { j: 1, k: -1 }[event.key];
      if (act) {
        event.preventDefault();
        act();
      } else if (by) {
        const bars = this.made.places.flatMap(({ bars: of }) => of || []);
        if (!bars.length) return;
        const at = this.chosen ? bars.indexOf(this.chosen) + by : 0;
        const one = bars[Math.min(Math.max(at, 0), bars.length - 1)];
        const [from, to] = this.view;
        this.say(one);
        if (one.bar.at + one.bar.took < from || one.bar.at > to) this.see(one.bar.at - 0.1 * (to - from), to - from);
        this.draw();
      }
    },
  };
}
