"use strict";
// The table of trials: its order, and the rows that are visible.

const EXTRA = 10; // rows above and below what is visible

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

class TrialTable extends TrialFilter {
  constructor(place, number, plots) {
    super();
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
        describe(this);
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
}
