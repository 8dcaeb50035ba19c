"use strict";
// The figures: where values lie, drawing them again, and finding what is nearest to the pointer.

/** Returns a number as Python's format(value, ".4g") writes it, with that many digits. */
function general(value, digits) {
  if (value === 0) return "0";
  const [shown, power] = value.toExponential(digits - 1).split("e"),
    exponent = Number(power);
  if (exponent >= -4 && exponent < digits) return String(Number(value.toPrecision(digits)));
  const size = String(Math.abs(exponent)).padStart(2, "0");
  return `${Number(shown)}e${exponent < 0 ? "-" : "+"}${size}`;
}

/** Returns the nearest integer, the even one if two are as near. */
function rounded(value) {
  const above = Math.round(value);
  return above - value === 0.5 && above % 2 ? above - 1 : above;
}

/** Returns a cell as readers see it: `text_of` of document.py in this language. */
function textOf(kind, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (kind === "p") return value < 1e-4 ? "< 0.0001" : general(value, 2);
  if (kind === "share") return `${general(100 * value, 3)}%`;
  if (kind === "integer") return (rounded(value) || 0).toLocaleString("en-US");
  if (kind === "seconds") {
    if (value < 120) return `${general(value, 3)} s`;
    return value < 7200 ? `${general(value / 60, 3)} min` : `${general(value / 3600, 3)} h`;
  }
  if (Math.abs(value) < 1e5) return general(value, 4).replace(/-/g, "−");
  return value.toExponential(3).replace(/e([+-])(\d)$/, "e$10$2");
}

/** Returns the expected best of k of N values for k = 1 to N; null is the worst value.
 *
 * The mean over all subsets, sum of v(i) C(i-1, k-1) / C(N, k) over v sorted from worst to best;
 * null where a subset may hold nothing but nulls.
 */
function bestOfK(values, better) {
  const sign = better === "min" ? 1 : -1;
  const bestFirst = values.filter((v) => v !== null).sort((a, b) => sign * (a - b));
  const n = values.length,
    finite = bestFirst.length;
  const means = [];
  for (let k = 1; k <= n; k++) {
    if (n - finite >= k) {
      means.push(null);
      continue;
    }
    let weight = k / n,
      mean = 0;
    for (let i = n; i >= k && weight > 0; i--) {
      mean += weight * bestFirst[n - i];
      weight *= (i - k) / Math.max(1, i - 1);
    }
    means.push(mean);
  }
  return means;
}

/** Returns the runs of vertices of a path, in the units of the drawing. */
function vertices(path, factor) {
  const runs = [];
  let x = 0,
    y = 0,
    command = "",
    first = null;
  const put = () => runs[runs.length - 1].push([x * factor, y * factor]);
  for (const [token] of path.matchAll(/[A-Za-z]|-?\d+(?:\.\d+)?/g)) {
    if (/[A-Za-z]/.test(token)) {
      command = token;
      first = null;
      continue;
    }
    const number = Number(token);
    if (command === "h") {
      x += number;
      put();
    } else if (command === "v") {
      y += number;
      put();
    } else if (first === null) first = number;
    else {
      if (command === "M") {
        x = first;
        y = number;
        runs.push([]);
      } else {
        x += first;
        y += number;
      }
      put();
      first = null;
    }
  }
  return runs;
}

class Scale {
  constructor(text, from, to) {
    const [low, high, log] = text.split(" ").map(Number);
    Object.assign(this, { low, high, log: Boolean(log), from, to });
  }
  at(value) {
    const f = this.log ? Math.log10 : (v) => v;
    if (value === null || (this.log && value <= 0)) return NaN;
    return (
      this.from + ((this.to - this.from) * (f(value) - f(this.low))) / (f(this.high) - f(this.low))
    );
  }
  value(place) {
    const share = (place - this.from) / (this.to - this.from);
    if (!this.log) return this.low + share * (this.high - this.low);
    return this.low * (this.high / this.low) ** share;
  }
  /** Returns [value, text] of ticks; minor ones have no text. */
  ticks() {
    const ratio = this.high / this.low,
      ticks = [];
    if (this.log && ratio >= 5) {
      const decades = Math.log10(ratio),
        every = Math.max(1, Math.ceil(decades / 6));
      const labelled = decades > 2.5 ? [1] : [1, 2, 5];
      for (let e = Math.floor(Math.log10(this.low)); e <= Math.ceil(Math.log10(this.high)); e++) {
        for (const digit of every === 1 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1]) {
          const value = Number(`${digit}e${e}`);
          if (value < this.low || value > this.high) continue;
          ticks.push([
            value,
            labelled.includes(digit) && e % every === 0 ? textOf("number", value) : "",
          ]);
        }
      }
      return ticks;
    }
    const rough = (this.high - this.low) / 5,
      power = 10 ** Math.floor(Math.log10(rough));
    const off = (m) => Math.abs(Math.log((m * power) / rough));
    const step = power * [1, 2, 5, 10].reduce((a, b) => (off(b) < off(a) ? b : a));
    for (let i = Math.ceil(this.low / step - 1e-9); i <= this.high / step + 1e-9; i++) {
      ticks.push([i * step, textOf("number", Number((i * step).toPrecision(12)))]);
    }
    return ticks;
  }
}

class Plot {
  constructor(figure) {
    this.figure = figure;
    this.svg = figure.querySelector("svg.plot");
    this.data = JSON.parse(figure.querySelector("script").textContent);
    const [left, top, right, bottom] = this.svg.dataset.box.split(" ").map(Number);
    Object.assign(this, { left, top, right, bottom });
    this.x = new Scale(this.svg.dataset.x, left, right);
    this.y = new Scale(this.svg.dataset.y, bottom, top);
    this.drawn = [this.svg.querySelector(".grid"), this.svg.querySelector(".yt")];
    this.given = { low: this.y.low, high: this.y.high, log: this.y.log };
    const elements = this.svg.querySelectorAll(".s");
    let x = [];
    this.series = this.data.s.map((each, i) => {
      if (each.x) x = each.x;
      else if (each.y && each.k !== "rule") each.x = x; // as of the series before
      const element = elements[i],
        faint = element.classList.contains("f"),
        { a } = element.dataset;
      const k = each.k ?? "line",
        line = k === "line" || k === "steps";
      return { ...each, k, a: a && Number(a), element, faint, line };
    });
    for (const each of this.series) each.element.series = each;
  }

  /** Reads the values of what has none, a faint line or a band, from its path. */
  runs(series) {
    if (!series.runs) {
      const faint = series.element.matches("path");
      const path = faint ? series.element : series.element.firstElementChild;
      const y = new Scale(this.svg.dataset.y, this.bottom, this.top);
      series.runs = vertices(path.getAttribute("d"), faint ? 2 : 1).map((run) =>
        run.map(([a, b]) => [this.x.value(a), y.value(b)]),
      );
    }
    return series.runs;
  }

  /** Returns runs of places [x, y, index] of what is shown of a series. */
  places(series) {
    if (series.placed) return series.placed;
    let runs = [[]];
    if (!series.x && !series.y) {
      runs = this.runs(series).map((run) =>
        run.map(([x, y], i) => [this.x.at(x), this.y.at(y), i]),
      );
    } else {
      const ys = series.now || series.y || [];
      ys.forEach((value, i) => {
        const place = [this.x.at(series.x[i]), this.y.at(value), i];
        if (series.left && series.left(i)) return;
        if (Number.isNaN(place[0]) || Number.isNaN(place[1])) runs.push([]);
        else runs[runs.length - 1].push(place);
      });
      runs = runs.filter((run) => run.length);
    }
    return (series.placed = runs);
  }

  /** Draws a series again. */
  draw(series) {
    series.placed = null;
    const { element } = series;
    element.style.display = series.hidden ? "none" : "";
    if (series.hidden) return;
    const faint = element.matches("path");
    const round = (v) => Math.round(faint ? v / 2 : v);
    let path = "";
    if (series.k === "rule") {
      if (!series.y) return;
      path = series.y.map((v) => `M${this.left} ${round(this.y.at(v))}H${this.right}`).join("");
    } else if (series.k === "interval") {
      path = this.places(series)
        .flat()
        .map(
          ([x, y, i]) =>
            `M${round(x) - 7} ${round(y)}h14m-7 0V${round(this.y.at(series.h[i]))}m-7 0h14`,
        )
        .join("");
    } else if (series.k === "points") {
      const points = this.places(series).flat();
      path = points.length
        ? `M${points.map(([x, y]) => `${round(x)} ${round(y)}`).join("L")}h0`
        : "";
    } else {
      const join =
        series.k === "steps" && series.x
          ? (run) =>
              run
                .map(([x, y], i) => (i ? `H${round(x)}V${round(y)}` : `M${round(x)} ${round(y)}`))
                .join("")
          : (run) =>
              `M${run.map(([x, y]) => `${round(x)} ${round(y)}`).join("L")}${run.length > 1 ? "" : "h0"}`;
      path = this.places(series)
        .map((run) => join(run) + (series.k === "band" ? "z" : ""))
        .join("");
    }
    (faint ? element : element.firstElementChild).setAttribute("d", path);
    const marks = faint ? null : element.children[1];
    if (!marks) return;
    let points = this.places(series).flat();
    const last = points.length - 1;
    if (last > 8) points = [...Array(9).keys()].map((i) => points[Math.round((i * last) / 8)]);
    marks.setAttribute(
      "d",
      points.length ? `M${points.map(([x, y]) => `${round(x)} ${round(y)}`).join("L")}h0` : "",
    );
  }

  /** Returns the least value of what stands in front. */
  least() {
    const values = this.series.flatMap((each) => [...(each.y ?? []), ...(each.h ?? [])]);
    return values.reduce((a, b) => (b !== null && b < a ? b : a), Infinity);
  }

  /** Makes the y axis linear or logarithmic. */
  rescale(log) {
    const { y, given } = this;
    y.log = log;
    if (log === given.log) {
      Object.assign(y, given);
      this.axis.forEach((markup, i) => {
        this.drawn[i].innerHTML = markup;
      });
    } else {
      this.axis ??= this.drawn.map((element) => element.innerHTML);
      this.changeAxis(log);
    }
    this.series.forEach((each) => this.draw(each));
  }

  changeAxis(log) {
    const { y, given } = this;
    if (log) y.low = Math.max(this.least() / 1.05, given.high * 1e-9);
    else y.low = Math.min(given.low, 0);
    let grid = "",
      small = "",
      texts = "";
    for (const [value, text] of y.ticks()) {
      const place = Math.round(y.at(value));
      if (text) {
        grid += `M${this.left} ${place}H${this.right}`;
        texts += `<text x="${this.left - 14}" y="${place + 9}" text-anchor="end">${text}</text>`;
      } else small += `M${this.left - 8} ${place}h8`;
    }
    this.svg.querySelector(".grid .y").setAttribute("d", grid);
    this.svg.querySelector(".grid .ym").setAttribute("d", small);
    this.svg.querySelector(".yt").innerHTML = texts;
  }

  /** Returns the series and the point that are nearest to a place, within a reach. */
  nearest(x, y, reach) {
    let best = null,
      least = reach;
    const offer = (distance, series, at) => {
      if (distance < least) {
        least = distance;
        best = { series, ...at };
      }
    };
    for (const series of this.series) {
      if (series.hidden || series.k === "band") continue;
      const push = series.faint ? 1.6 : 1;
      if (series.k === "rule") {
        const place = series.y
          ? Math.abs(y - this.y.at(series.y[0]))
          : Math.abs(x - this.x.at(series.x[0]));
        offer(place * 1.6, series, { x, y, index: 0 });
        continue;
      }
      for (const run of this.places(series)) {
        for (let i = 0; i < run.length; i++) {
          const [a, b, index] = run[i];
          if (!series.line || run.length === 1)
            offer(Math.hypot(x - a, y - b) * push, series, { x: a, y: b, index });
          else if (i && x >= run[i - 1][0] && x <= a) {
            const [a0, b0, before] = run[i - 1];
            const share = a > a0 ? (x - a0) / (a - a0) : 1,
              there = b0 + share * (b - b0);
            const steep = Math.max(1, Math.abs(b - b0) / Math.max(1, a - a0));
            const near = share < 0.5 ? { x: a0, y: b0, index: before } : { x: a, y: b, index };
            offer(
              (Math.abs(y - there) / Math.min(4, steep)) * push,
              series,
              series.x ? near : { x, y: there, index: -1 },
            );
          }
        }
      }
    }
    return best;
  }
}
