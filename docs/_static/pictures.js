// Curves of a cell when it is opened, and the overview: drawn by plotly, which is loaded when it is first wanted.
(() => {
  const data = window.dpbenchResults;
  const own = document.currentScript.src;
  const colors = ["#3b82c4", "#e08214", "#2a9d6f", "#d6517d", "#8b6fd1", "#a0785a", "#17a2b8", "#8c8c8c"];
  const drawn = new Set();
  let library;

  function plotly() {
    library ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = new URL("plotly.min.js", own).href;
      script.onload = () => resolve(window.Plotly);
      script.onerror = reject;
      document.head.append(script);
    });
    return library;
  }

  const style = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

  function look() {
    const grid = style("--color-background-border");
    const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid };
    return { ink: style("--color-foreground-primary"), paper: style("--color-background-primary"), axis };
  }

  function themed() {
    const { ink, paper, axis } = look();
    const changes = { "font.color": ink, "hoverlabel.bgcolor": paper, "hoverlabel.font.color": ink };
    for (const side of ["xaxis", "yaxis"])
      for (const [key, color] of Object.entries(axis)) changes[`${side}.${key}`] = color;
    return changes;
  }

  function layout(x, y) {
    const { ink, paper, axis } = look();
    return {
      font: { color: ink, size: 12, family: "inherit" },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: paper, font: { color: ink }, align: "left" },
      margin: { l: 55, r: 15, t: 35, b: 85 },
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", font: { size: 11 } },
      xaxis: { ...axis, automargin: true, ...x },
      yaxis: { ...axis, automargin: true, ...y },
    };
  }

  async function draw(place, traces, shape) {
    const Plotly = await plotly();
    await Plotly.newPlot(place, traces, shape, { displaylogo: false, responsive: true, displayModeBar: false });
    drawn.add(place);
  }

  function drawCell(place) {
    const lines = data?.cells?.[place.dataset.cell];
    if (!lines || drawn.has(place) || place.dataset.asked) return;
    place.dataset.asked = "yes";
    const traces = lines.map((line, n) => ({
      ...line, mode: line.x.length > 1 ? "lines" : "markers", line: { width: 1.6, color: colors[n % colors.length] },
    }));
    place.classList.add("drawn");
    draw(place, traces, layout({ title: { text: "step" }, rangemode: "tozero" }, { title: { text: data.axis } }));
  }

  function limits(traces) {
    const values = traces.flatMap((trace) => trace.y);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const ends = traces.flatMap((t) => t.y.flatMap((y, n) => [y - t.half[n], y + t.half[n]]));
    const room = most - least;
    return [
      Math.max(Math.min(...ends), least - 0.2 * room) - 0.04 * room,
      Math.min(Math.max(...ends), most + 0.2 * room) + 0.04 * room,
    ];
  }

  function ticks(values) {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const steps = most / least > 300 ? [1] : [1, 2, 5]; // more would touch on a phone
    const marks = [];
    for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++)
      for (const step of steps) marks.push(Number(`${step}e${power}`));
    return marks;
  }

  const symbols = { ours: "circle", paper: "x", field: "star" };

  function wrapped(name) {
    const room = innerWidth < 700 ? 42 : 100; // letters in a line of the legend
    return name.replace(new RegExp(`(.{1,${room}})(\\s+|$)`, "g"), "$1<br>").replace(/<br>$/, "");
  }

  function drawPanel(place, panel) {
    const traces = panel.traces.map((trace) => {
      const color = trace.whose === "field" ? colors[7] : colors[trace.color % (colors.length - 1)];
      const symbol = trace.unit === "microbatch" ? "diamond-open" : symbols[trace.whose];
      return {
        x: trace.x, y: trace.y, name: wrapped(trace.name), text: trace.text, customdata: trace.links, mode: "markers",
        hovertemplate: "%{text}<extra></extra>", marker: { color, symbol, size: 9, opacity: 0.85 },
        error_y: { type: "data", array: trace.half, visible: trace.half.some((half) => half > 0), thickness: 1, color },
      };
    });
    const title = { text: `ε for one ${panel.unit} (log scale)` };
    const marks = ticks(panel.traces.flatMap((trace) => trace.x));
    const x = { type: "log", title, tickvals: marks, ticktext: marks.map((mark) => mark.toLocaleString("en")) };
    const shape = layout(x, { title: { text: panel.axis }, range: limits(panel.traces) });
    shape.showlegend = true;
    shape.title = { text: panel.title, font: { size: 14 } };
    const lines = traces.flatMap((trace) => trace.name.split("<br>")).length;
    shape.margin.b = 60 + (innerWidth < 700 ? 19 : 16) * lines; // the names stand below; in more than half of the height they scroll
    place.style.height = `${330 + shape.margin.b}px`;
    draw(place, traces, shape).then(() =>
      place.on("plotly_click", (event) => {
        if (event.points[0].customdata) location.href = event.points[0].customdata;
      })
    );
  }

  for (const details of document.querySelectorAll("details.cell")) {
    const show = () => details.open && details.querySelectorAll(".curve").forEach(drawCell);
    details.addEventListener("toggle", show);
    show();
  }
  const overview = document.querySelector(".overview");
  if (overview && data?.panels) {
    document.querySelector("img.still")?.closest("p, a")?.classList.add("replaced");
    for (const panel of data.panels) {
      const place = document.createElement("div");
      overview.append(place);
      drawPanel(place, panel);
    }
  }

  const follow = async () => {
    if (!drawn.size) return;
    const Plotly = await plotly();
    for (const place of drawn) Plotly.relayout(place, themed());
  };
  new MutationObserver(follow).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow);
})();
