"use strict";
// The filter of a table of trials: its controls, and the conditions that they state.

const NUMERIC = new Set(["integer", "number", "p", "share", "seconds"]);

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

const keyOf = (arm) => `<svg class="key" aria-hidden="true"><use href="#k${arm}"/></svg>`;

/** The filter: `state` has the text, the arms and ends (null for all), the ranges and the order. */
class TrialFilter {
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
}
