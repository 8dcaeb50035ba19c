"use strict";
// The table of trials: sorting, filtering, and what a filter changes in the rest of the page.

const NUMERIC = new Set(["integer", "number", "p", "share", "seconds"]);
const EXTRA = 10; // rows above and below what is visible

/** Makes an element with properties, attributes (those with a "-") and children. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => {
    button.textContent = before;
  }, 1200);
}

/** Quotes a word for a shell, as Python's shlex does. */
function shellWord(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`;
}

class TrialTable {
  constructor(place, number, plots) {
    Object.assign(this, {
      place,
      plots: plots.filter(
        (plot) => plot.figure.closest(".block").dataset.trials === String(number),
      ),
    });
    this.data = JSON.parse(place.querySelector("script").textContent);
    this.size = this.data.cells[0].length;
    this.scroll = place.querySelector(".scroll");
    this.body = place.querySelector("tbody");
    this.count = place.querySelector(".shown");
    this.state = {
      text: "",
      arms: null,
      ends: null,
      low: {},
      high: {},
      sort: [this.data.goal, this.data.better === "min" ? 1 : -1],
    };
    this.search = Array.from({ length: this.size }, (_, i) =>
      this.data.columns
        .map((c, j) => (NUMERIC.has(c.kind) ? "" : String(this.cell(i, j) ?? "")))
        .join(" ")
        .toLowerCase(),
    );
    this.arms = [...new Set(this.data.cells[this.data.arm])];
    this.ends = [...new Set(this.data.cells[this.data.end])].sort();
    this.ranged = [this.data.goal, ...this.data.axes].filter((j) =>
      NUMERIC.has(this.data.columns[j].kind),
    );
    this.selected = new Uint8Array(this.size).fill(1);
    this.order = [...Array(this.size).keys()];
    if (!this.size) return;
    place.classList.add("live");
    this.addFilter();
    this.addSorting();
    this.scroll.addEventListener(
      "scroll",
      () => {
        this.frame ??= requestAnimationFrame(() => {
          this.frame = null;
          this.render();
        });
      },
      { passive: true },
    );
    this.apply(false);
  }

  cell(row, column) {
    return this.data.cells[column][row];
  }

  number(row, column) {
    const value = this.cell(row, column);
    return typeof value === "number" ? value : null;
  }

  // The controls

  addFilter() {
    const change = (set) => (event) => {
      set(event.target);
      this.apply();
    };
    this.box = make("input", {
      type: "search",
      className: "search",
      placeholder: this.example(),
      spellcheck: false,
      "aria-label": "Filter trials by words and comparisons",
      oninput: change((box) => {
        this.state.text = box.value;
      }),
    });
    this.clear = make("button", {
      type: "button",
      className: "small",
      textContent: "Show all trials",
      hidden: true,
      onclick: () => {
        this.state = { ...this.state, text: "", arms: null, ends: null, low: {}, high: {} };
        this.fill();
        this.apply();
      },
    });
    const choices = (title, names, key) => {
      const boxes = names.map((name) => {
        const total = this.data.cells[key === "arms" ? this.data.arm : this.data.end].filter(
          (c) => c === name,
        ).length;
        const label = make(
          "label",
          {},
          make("input", {
            type: "checkbox",
            checked: true,
            value: name,
            onchange: () => {
              const chosen = [...set.querySelectorAll("input")]
                .filter((b) => b.checked)
                .map((b) => b.value);
              this.state[key] = chosen.length === names.length ? null : chosen;
              this.apply();
            },
          }),
        );
        const arm = key === "arms" ? this.data.arms.indexOf(name) : -1;
        if (arm >= 0) {
          label.dataset.a = arm;
          label.className = "arm";
          label.insertAdjacentHTML("beforeend", keyOf(arm));
        }
        label.append(`${name} `, make("span", { className: "dim", textContent: total }));
        return label;
      });
      const set = make("fieldset", {}, make("legend", { textContent: title }), ...boxes);
      return set;
    };
    this.armBoxes = choices("Arm", this.arms, "arms");
    this.endBoxes = choices("End", this.ends, "ends");
    this.rangeBoxes = this.ranged.map((column) => {
      const values = this.data.cells[column].filter((v) => typeof v === "number");
      const { title, kind } = this.data.columns[column];
      const box = (end, extreme) =>
        make("input", {
          type: "text",
          inputMode: "decimal",
          column,
          end,
          spellcheck: false,
          placeholder: values.length ? textOf(kind, extreme(values)) : "",
          "aria-label": `${end === "low" ? "least" : "largest"} ${title}`,
          oninput: change((input) => this.limit(input)),
        });
      const most = (list) => list.reduce((a, b) => Math.max(a, b)),
        least = (list) => list.reduce((a, b) => Math.min(a, b));
      return make(
        "span",
        { className: "range" },
        box("low", least),
        ` ≤ ${title} ≤ `,
        box("high", most),
      );
    });
    this.place
      .querySelector(".filter")
      .replaceChildren(
        make("div", {}, this.box),
        make("div", {}, this.armBoxes),
        make("div", {}, this.endBoxes),
        make("div", { className: "ranges" }, ...this.rangeBoxes),
      );
  }

  example() {
    const column = this.data.columns[this.ranged[1] ?? this.ranged[0]];
    return column ? `words, or ${column.title.split(/[ ,]/)[0]} < 0.01` : "words";
  }

  limit(input) {
    const value = Number(input.value.replace("−", "-")),
      usable = input.value.trim() !== "" && !Number.isNaN(value);
    input.classList.toggle("wrong", input.value.trim() !== "" && !usable);
    if (usable) this.state[input.end][input.column] = value;
    else delete this.state[input.end][input.column];
  }

  addSorting() {
    this.heads = [...this.place.querySelectorAll("thead th")];
    this.heads.forEach((head, column) => {
      const button = make("button", {
        type: "button",
        textContent: head.textContent,
        onclick: () => {
          const [now, sign] = this.state.sort;
          this.state.sort = [column, now === column ? -sign : 1];
          this.apply();
        },
      });
      head.replaceChildren(button);
    });
    this.place.querySelector("colgroup").append(make("col", { style: "" }));
    this.place.querySelector("colgroup").lastChild.style.width = "13ch";
    this.place
      .querySelector("thead tr")
      .append(make("th", { scope: "col", textContent: "repeat" }));
  }

  /** Writes the state into the controls. */
  fill() {
    this.box.value = this.state.text;
    const check = (set, chosen) => {
      for (const b of set.querySelectorAll("input"))
        b.checked = !chosen || chosen.includes(b.value);
    };
    check(this.armBoxes, this.state.arms);
    check(this.endBoxes, this.state.ends);
    for (const range of this.rangeBoxes) {
      for (const input of range.querySelectorAll("input")) {
        input.value = this.state[input.end][input.column] ?? "";
        input.classList.remove("wrong");
      }
    }
  }

  // The filter

  /** Returns the conditions that the text asks for: words, and comparisons such as rate<0.01. */
  conditions() {
    const compare = {
      "<": (a, b) => a < b,
      "<=": (a, b) => a <= b,
      ">": (a, b) => a > b,
      ">=": (a, b) => a >= b,
      "=": (a, b) => a === b,
    };
    const text = this.state.text.toLowerCase().replace(/\s*(<=|>=|<|>|=)\s*/g, "$1");
    return text
      .split(/\s+/)
      .filter(Boolean)
      .map((token) => {
        const match = token.match(/^(.+?)(<=|>=|<|>|=)(.*)$/);
        const column = match ? this.column(match[1]) : -1;
        if (column < 0) {
          // The name of a column that is still being typed.
          if (this.column(token, true) >= 0 && !this.search.some((text) => text.includes(token)))
            return () => true;
          return (row) => this.search[row].includes(token);
        }
        const value = Number(match[3]);
        if (match[3] === "" || Number.isNaN(value)) return () => true; // still being typed
        return (row) => {
          const cell = this.number(row, column);
          return cell !== null && compare[match[2]](cell, value);
        };
      });
  }

  /** Returns the column of numbers that a word names or, if `begins`, begins to name; or -1. */
  column(word, begins = false) {
    const numeric = this.data.columns.map((c, j) => [c, j]).filter(([c]) => NUMERIC.has(c.kind));
    const tests = [
      (c) => c.title.toLowerCase() === word,
      (c) => c.name === word,
      (c) => c.title.toLowerCase().startsWith(word),
      (c) => c.title.toLowerCase().includes(word),
    ];
    for (const test of begins ? [tests[2]] : tests) {
      const found = numeric.find(([c]) => test(c));
      if (found) return found[1];
    }
    return -1;
  }

  apply(remember = true) {
    const { state } = this,
      tests = this.conditions();
    if (state.arms) tests.push((row) => state.arms.includes(this.cell(row, this.data.arm)));
    if (state.ends) tests.push((row) => state.ends.includes(this.cell(row, this.data.end)));
    for (const [column, value] of Object.entries(state.low))
      tests.push((row) => {
        const v = this.number(row, column);
        return v !== null && v >= value;
      });
    for (const [column, value] of Object.entries(state.high))
      tests.push((row) => {
        const v = this.number(row, column);
        return v !== null && v <= value;
      });
    for (let row = 0; row < this.size; row++)
      this.selected[row] = tests.every((test) => test(row)) ? 1 : 0;
    this.active = tests.length > 0;
    this.sort();
    this.visible = this.order.filter((row) => this.selected[row]);
    const shown = this.visible.length.toLocaleString("en-US"),
      all = this.size.toLocaleString("en-US");
    this.count.replaceChildren(
      make(
        "span",
        {},
        make("strong", { textContent: this.active ? `${shown} of ${all}` : all }),
        " trials",
      ),
      this.clear,
    );
    this.clear.hidden = !this.active;
    if (remember) this.scroll.scrollTop = 0;
    this.render();
    // The figures follow when nothing was typed for a moment.
    clearTimeout(this.pending);
    this.pending = setTimeout(
      () => {
        this.pending = null;
        this.describe();
      },
      remember ? 80 : 0,
    );
    if (remember) {
      clearTimeout(this.writing);
      this.writing = setTimeout(() => writeHash(TRIALS), 200);
    }
  }

  sort() {
    const [column, sign] = this.state.sort,
      numeric = NUMERIC.has(this.data.columns[column].kind);
    if (this.sorted === `${column} ${sign}`) return;
    this.sorted = `${column} ${sign}`;
    const collator = new Intl.Collator("en", { numeric: true });
    this.order = [...Array(this.size).keys()].sort((a, b) => {
      const x = numeric ? this.number(a, column) : this.cell(a, column),
        y = numeric ? this.number(b, column) : this.cell(b, column);
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return sign * (numeric ? x - y : collator.compare(x, y)) || a - b;
    });
    this.heads.forEach((head, j) => {
      if (j === column) head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
  }

  // The rows that are visible

  command(row) {
    const folder = this.data.folder < 0 ? "" : String(this.cell(row, this.data.folder) ?? "");
    return this.data.command
      .replaceAll("{folder}", () => shellWord(folder))
      .replaceAll("{trial}", () => shellWord(String(this.cell(row, this.data.trial))));
  }

  line(row) {
    const arm = this.data.arms.indexOf(this.cell(row, this.data.arm));
    const element = make("tr", {});
    if (arm >= 0) element.dataset.a = arm;
    this.data.columns.forEach((column, j) => {
      const value = this.cell(row, j),
        text = textOf(column.kind, value),
        cell = make("td");
      if (j === this.data.arm && arm >= 0)
        cell.innerHTML = `<span class="arm">${keyOf(arm)}${escaped(text)}</span>`;
      else if (j === this.data.folder && value)
        cell.append(
          make("a", {
            href: String(value)
              .split("/")
              .map((part) => encodeURIComponent(part.toWellFormed()))
              .join("/"),
            textContent: text,
            title: text,
          }),
        );
      else cell.textContent = text;
      if (text.length > 20) cell.title = text;
      element.append(cell);
    });
    element.append(
      make(
        "td",
        {},
        make("button", {
          type: "button",
          className: "small",
          textContent: "Copy",
          title: this.command(row),
          "aria-label": `Copy the command that repeats ${this.cell(row, this.data.trial)}`,
          onclick: (event) => copy(this.command(row), event.target),
        }),
      ),
    );
    element.row = row;
    return element;
  }

  render(all = 0) {
    const height = this.height ?? 34,
      total = this.visible.length;
    const first = all ? 0 : Math.max(0, Math.floor(this.scroll.scrollTop / height) - EXTRA);
    const last = all
      ? Math.min(all, total)
      : Math.min(total, first + Math.ceil(this.scroll.clientHeight / height || 20) + 2 * EXTRA);
    const held = this.body.contains(document.activeElement) ? document.activeElement : null;
    const [row, tag] = held ? [held.closest("tr").row, held.localName] : [];
    const pad = (rows) => {
      const line = make(
        "tr",
        { className: "pad" },
        make("td", { colSpan: this.data.columns.length + 1 }),
      );
      line.firstChild.style.height = `${rows * height}px`;
      return line;
    };
    const lines = this.visible.slice(first, last).map((each) => this.line(each));
    if (!total)
      lines.push(
        make(
          "tr",
          {},
          make("td", {
            className: "none",
            colSpan: this.data.columns.length + 1,
            textContent: "No trial passes the filter.",
          }),
        ),
      );
    this.body.replaceChildren(pad(first), ...lines, pad(all ? 0 : total - last));
    if (!this.height && total) this.height = lines[0].getBoundingClientRect().height || undefined;
    if (held)
      lines
        .find((line) => line.row === row)
        ?.querySelector(tag)
        ?.focus({ preventScroll: true });
  }

  // What the filter changes in figures and panels

  describe() {
    const out = (t) => typeof t === "number" && !this.selected[t];
    for (const plot of this.plots) {
      this.note(plot);
      const again = new Set(plot.series.filter((s) => s.r).map((s) => s.a));
      for (const series of plot.series) {
        if (series.r === "best_of_k") {
          series.now = this.active ? bestOfK(this.points(series), this.data.better) : null;
          plot.draw(series);
        } else if (series.k === "band" && again.has(series.a)) {
          series.element.style.display = this.active ? "none" : "";
        } else if (series.t?.length === 1 && series.line) {
          const hidden = out(series.t[0]);
          if (hidden !== Boolean(series.hidden)) {
            series.hidden = hidden;
            series.element.style.display = hidden ? "none" : "";
          }
        } else if (series.t?.some((t) => typeof t === "number")) {
          series.left = this.active ? (i) => out(series.t[i]) : null;
          plot.draw(series);
        }
      }
    }
    markStale(TRIALS);
  }

  /** Says below a figure of trials how many it shows. */
  note(plot) {
    if (!plot.series.some((s) => s.t?.some((t) => typeof t === "number"))) return;
    if (!plot.part) {
      plot.part = make("p", { className: "part" });
      plot.figure.querySelector(".drawing").after(plot.part);
    }
    plot.part.hidden = !this.active;
    plot.part.textContent = `Drawn of ${this.visible.length} of ${this.size} trials. Means of compared runs, the description and the table are of all.`;
  }

  /** Returns the goals of the selected trials of a series, several seeds of a point as their mean. */
  points(series) {
    const groups = new Map(),
      seeds = series.t.length > series.x.length;
    for (const row of series.t) {
      if (typeof row !== "number") continue;
      const key = seeds ? this.data.axes.map((j) => this.cell(row, j)).join("\n") : row;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    }
    return [...groups.values()]
      .filter((rows) => rows.every((row) => this.selected[row]))
      .map((rows) => {
        const goals = rows.map((row) => this.number(row, this.data.goal));
        return goals.includes(null) ? null : goals.reduce((a, b) => a + b, 0) / goals.length;
      });
  }
}

const keyOf = (arm) => `<svg class="key" aria-hidden="true"><use href="#k${arm}"/></svg>`;

/** Says above panels that test that they are of all trials, while a filter is on. */
function markStale(tables) {
  const active = tables.filter((table) => table.active);
  document.documentElement.classList.toggle("filtered", active.length > 0);
  const what = active
    .map(
      (t) =>
        `${t.visible.length} of ${t.size} trials${tables.length > 1 ? ` of ${t.data.workload}` : ""}`,
    )
    .join(", ");
  for (const panel of document.querySelectorAll('.panel[data-kind="tests"]')) {
    let note = panel.querySelector(":scope > .stale");
    if (!note) {
      note = make("p", { className: "stale" });
      panel.querySelector("h2").after(note);
    }
    note.hidden = !active.length;
    note.textContent = `A filter is on (${what}). The numbers of this panel are of all trials: a test of a selection that was made after seeing the results would mean nothing.`;
  }
}

// The state in the address

function writeHash(tables) {
  const state = new URLSearchParams();
  tables.forEach((table, i) => {
    const { text, arms, ends, low, high, sort } = table.state,
      name = (j) => table.data.columns[j].name;
    if (text) state.set(`${i}.text`, text);
    if (arms) state.set(`${i}.arm`, JSON.stringify(arms));
    if (ends) state.set(`${i}.end`, JSON.stringify(ends));
    for (const [j, value] of Object.entries(low)) state.set(`${i}.min.${name(j)}`, value);
    for (const [j, value] of Object.entries(high)) state.set(`${i}.max.${name(j)}`, value);
    if (sort[0] !== table.data.goal || sort[1] !== (table.data.better === "min" ? 1 : -1))
      state.set(`${i}.sort`, `${sort[1] > 0 ? "" : "-"}${name(sort[0])}`);
  });
  const hash = state.toString();
  if (!hash && !location.hash.startsWith("#trials?")) return;
  try {
    history.replaceState(null, "", hash ? `#trials?${hash}` : "#panel-trials");
  } catch {
    /* Some browsers allow it from no file. */
  }
}

function readHash(tables) {
  if (!location.hash.startsWith("#trials?")) return;
  const state = new URLSearchParams(location.hash.slice(8));
  const list = (text) => {
    try {
      const names = JSON.parse(text);
      return Array.isArray(names) ? names : null;
    } catch {
      return null;
    }
  };
  tables.forEach((table, i) => {
    if (!table.size) return;
    const find = (name) => table.data.columns.findIndex((c) => c.name === name);
    for (const [key, value] of state) {
      if (!key.startsWith(`${i}.`)) continue;
      const [, kind, ...rest] = key.split("."),
        column = find(rest.join("."));
      if (kind === "text") table.state.text = value;
      else if (kind === "arm") table.state.arms = list(value);
      else if (kind === "end") table.state.ends = list(value);
      else if (kind === "min" && column >= 0 && !Number.isNaN(Number(value)))
        table.state.low[column] = Number(value);
      else if (kind === "max" && column >= 0 && !Number.isNaN(Number(value)))
        table.state.high[column] = Number(value);
      else if (kind === "sort" && find(value.replace(/^-/, "")) >= 0)
        table.state.sort = [find(value.replace(/^-/, "")), value.startsWith("-") ? -1 : 1];
    }
    table.fill();
    table.apply();
  });
  document.getElementById("panel-trials")?.scrollIntoView();
}
