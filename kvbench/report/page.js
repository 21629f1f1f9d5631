// The page is complete without this: it adds sorting, filtering and readouts, and its controls exist only where it runs.
"use strict";
(() => {
  const make = (tag, props = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), props);
    element.append(...children);
    return element;
  };
  const words = (element) => element.textContent.replace(/\s+/g, " ").trim();

  // Sorting: a number where the cell holds one, else its words; what was not measured comes last, whatever the direction.
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    if (!cell || cell.colSpan > 1) return null;
    const data = cell.querySelector("data");
    if (data) return Number.isNaN(Number(data.value)) ? null : Number(data.value);
    if (cell.matches(".none, .missing")) return null;
    const text = words(cell);
    const number = Number(text.replace(/,/g, ""));
    return text !== "" && Number.isFinite(number) ? number : text;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });

  const sortable = (table) => {
    const body = table.tBodies[0];
    const heads = table.tHead ? [...table.tHead.rows[0].cells] : [];
    if (table.tBodies.length !== 1 || table.tHead?.rows.length !== 1 || body.rows.length < 2) return;
    const original = [...body.rows];
    heads.forEach((head, column) => {
      const button = make("button", { type: "button", className: "sort", title: "Sort by this column" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort") ?? "none"];
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (next === "none") return body.append(...original);
        head.setAttribute("aria-sort", next);
        const sign = next === "ascending" ? 1 : -1;
        const keyed = original.map((row) => [keyOf(row, column), row]);
        keyed.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : sign * compare(a, b)));
        body.append(...keyed.map(([, row]) => row));
      });
    });
  };

  // Filtering: rows by their words, and by the outcomes that their badges name. A group's heading goes with its last row.
  const outcomes = (row) => [...row.querySelectorAll(".badge")].map((badge) => words(badge).replace(/^\S+ /, ""));
  const filterable = (frame, table) => {
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]).filter((row) => !row.classList.contains("group"));
    if (rows.length < 6) return;
    const name = frame.getAttribute("aria-label") ?? words(document.getElementById(frame.getAttribute("aria-labelledby"))).slice(0, 80);
    const text = make("input", { type: "search", placeholder: "Filter rows", ariaLabel: `Filter rows: ${name}` });
    const known = [...new Set(rows.flatMap(outcomes))].sort();
    const pick = make("select", { ariaLabel: `Outcome: ${name}` }, make("option", { value: "" }, "All outcomes"),
      ...known.map((word) => make("option", { value: word }, word)));
    const said = make("span", { className: "said" });
    said.setAttribute("role", "status");
    const apply = () => {
      const wanted = text.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const own = words(row).toLowerCase();
        row.hidden = !(wanted.every((word) => own.includes(word)) && (!pick.value || outcomes(row).includes(pick.value)));
        shown += row.hidden ? 0 : 1;
      }
      for (const body of table.tBodies) {
        for (const group of body.querySelectorAll(".group")) group.hidden = [...body.rows].every((row) => row === group || row.hidden);
      }
      said.textContent = shown === rows.length ? "" : `${shown} of ${rows.length} rows`;
    };
    text.addEventListener("input", apply);
    pick.addEventListener("change", apply);
    frame.before(make("div", { className: "controls" }, text, ...(known.length > 1 ? [pick] : []), said));
  };

  // Readouts: what a cell of a heat table, or a marked point of a plot, says in full.
  const readout = (target) => {
    if (target.dataset.readout) return target.dataset.readout;
    const row = target.parentElement;
    const heads = row.closest("table").tHead.rows[0].cells;
    const place = `${words(row.cells[0])}, ${words(heads[0])} ${words(heads[target.cellIndex])}`;
    const exact = target.querySelector("data")?.value;
    const said = [...target.children].map(words).join(" ");
    return `${place}: ${said}${exact && !said.replace(/,/g, "").includes(exact) ? ` (${exact})` : ""}`;
  };
  const show = (event) => {
    const target = event.target.closest?.("[data-readout], .heat td");
    const frame = target?.closest(".heats, .plot");
    if (!frame) return;
    if (!frame.nextElementSibling?.classList.contains("readout")) {
      frame.after(make("p", { className: "readout", ariaHidden: "true" }));
    }
    frame.nextElementSibling.textContent = readout(target);
  };

  for (const frame of document.querySelectorAll("main .scroll")) {
    const table = frame.querySelector("table");
    if (!table) continue;
    if (frame.classList.contains("heat")) continue;
    sortable(table);
    filterable(frame, table);
  }
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);

  // On paper nothing can be opened.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((details) => { details.open = false; }));
})();
