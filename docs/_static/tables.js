// Tables that sort by any column, and links that open what they lead to.
(() => {
  const number = /^([+\-−]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?=$|[\s%±/[(×])/i;

  const text = (row, column) => (row.cells[column]?.textContent ?? "").trim();

  const value = (words) => {
    if (words.startsWith("∞")) return Infinity;
    const found = number.exec(words);
    return found ? Number(found[1].replaceAll(",", "").replace("−", "-")) : NaN;
  };

  const missing = (words) => words === "" || words === "–";

  function sort(table, column, direction) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const known = rows.map((row) => text(row, column)).filter((words) => !missing(words));
    const numeric = known.length > 0 && known.every((words) => !Number.isNaN(value(words)));
    const order = (a, b) => (numeric ? value(a) - value(b) : a.localeCompare(b, undefined, { numeric: true }));
    rows.sort((one, other) => {
      const [a, b] = [text(one, column), text(other, column)];
      return missing(a) || missing(b) ? missing(a) - missing(b) : direction * order(a, b); // what is missing stays last
    });
    body.append(...rows);
  }

  function makeSortable(table) {
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
    if (!table.tBodies[0] || table.tBodies[0].rows.length < 2) return;
    for (const [column, head] of heads.entries()) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      if (button.textContent.trim() === "") button.setAttribute("aria-label", "sort by this column");
      head.append(button);
      button.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        sort(table, column, direction);
      });
    }
  }

  function openTarget() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = target?.closest("details.cell");
    if (!details) return;
    details.open = true;
    details.scrollIntoView();
  }

  document.querySelectorAll("article table").forEach(makeSortable);
  window.addEventListener("hashchange", openTarget);
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#cell-"]');
    if (link?.getAttribute("href") === location.hash) openTarget(); // no change of the address: it was closed again
  });
  openTarget();
})();
