"use strict";
// Draws a snapshot of a run. Text from events only ever becomes text nodes.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const MAX_LOG = 4000, MAX_ROWS = 300;
let now = null, log = [];

function make(tag, attributes = {}, ...inside) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...inside);
  return node;
}
function draw(parent, tag, attributes = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
const number = (value, digits = 2) => value == null || !Number.isFinite(value) ? "–" : value.toFixed(digits);
function span(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 100) return (Number.isInteger(seconds) ? seconds : seconds.toFixed(1)) + " s";
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours) return hours + " h " + (minutes % 60) + " m";
  return minutes + " m " + String(Math.floor(seconds % 60)).padStart(2, "0") + " s";
}
const since = (at) => at == null ? "–" : span(Math.max(0, at - (now.began ?? at)));
function size(bytes) {
  if (!bytes) return "–";
  const power = Math.min(4, Math.floor(Math.log2(bytes) / 10));
  return (bytes / 1024 ** power).toFixed(power ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}
const exit = (code) => code == null ? "" : code < 0 ? "signal " + -code : "exit code " + code;

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}
function timeTicks(length, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((n) => length / n <= count) ?? Math.ceil(length / count / 86400) * 86400;
  const found = [];
  for (let at = 0; at <= length; at += step) found.push(at);
  return found;
}
function table(heads, rows, empty) {
  if (!rows.length) return make("div", { class: "empty" }, empty);
  const kind = (name) => name.startsWith("#") ? "num" : name.startsWith("~") ? "text" : name.startsWith("=") ? "mono" : "";
  const plain = (name) => name.replace(/^[#~=]/, "");
  return make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((h) => make("th", { class: kind(h) }, plain(h))))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, at) =>
      make("td", { class: kind(heads[at]) }, cell instanceof Node ? cell : String(cell ?? "–")))))));
}

function chart(id, { series, x = (v) => String(v), low, high, marks = [], digits = 2, whole = false, times = false }) {
  const box = $(id), all = series.flatMap((one) => one.points);
  if (!all.length) { box.replaceChildren(make("div", { class: "empty" }, "nothing yet")); return; }
  const width = Math.max(240, box.clientWidth), height = 190, left = 46, right = 14, top = 8, bottom = 24;
  const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
  let x0 = times ? now.began ?? Math.min(...xs) : Math.min(...xs), x1 = times ? now.ended ?? now.now : Math.max(...xs), y0 = Math.min(low ?? Infinity, ...ys), y1 = Math.max(high ?? -Infinity, ...ys);
  if (x1 <= x0) { x1 = x0 + 1; }
  if (y1 === y0) { y1 += 0.5; y0 -= whole ? 0 : 0.5; }
  const px = (v) => left + (v - x0) / (x1 - x0) * (width - left - right);
  const py = (v) => top + (1 - (v - y0) / (y1 - y0)) * (height - top - bottom);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", series.map((one) => one.name).join(", "));
  const up = ticks(y0, y1, 5);
  for (const at of up.found) {
    if (whole && at % 1) continue;
    draw(svg, "line", { class: "grid", x1: left, x2: width - right, y1: py(at), y2: py(at) });
    draw(svg, "text", { x: left - 6, y: py(at) + 4, "text-anchor": "end" }, at.toFixed(whole ? 0 : up.digits));
  }
  const along = times ? timeTicks(x1 - x0, (width - left) / 80).map((at) => at + x0) : ticks(x0, x1, (width - left) / 70).found;
  for (const at of along) {
    if (!times && at % 1) continue;
    const place = px(at), anchor = place > width - 30 ? "end" : place < left + 10 ? "start" : "middle";
    draw(svg, "text", { x: place, y: height - 6, "text-anchor": anchor }, x(at));
  }
  for (const mark of marks) if (mark.at >= x0 && mark.at <= x1) {
    const tick = draw(svg, "rect", { class: "strike", x: px(mark.at) - 1, y: height - bottom - 7, width: 2, height: 7 });
    draw(tick, "title", {}, mark.text);
  }
  for (const { tone, points, dots } of series) {
    const line = points.map((p) => `${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`);
    if (times) for (let at = line.length - 1; at > 0; at--) line.splice(at, 0, `${line[at].split(",")[0]},${line[at - 1].split(",")[1]}`);
    draw(svg, "polyline", { class: "curve " + tone, points: line.join(" ") });
    if (dots || points.length === 1) for (const p of points) draw(svg, "circle", { class: "dot " + tone, cx: px(p[0]), cy: py(p[1]), r: 3 });
  }
  const keys = make("p", { class: "keys" }), labels = series.map((one) => {
    const key = make("span", { class: "key " + one.tone });
    keys.append(key);
    return [one, key];
  });
  const where = make("span", { class: "quiet" });
  if (labels.length) keys.append(where);
  const line = draw(svg, "line", { class: "hover", y1: top, y2: height - bottom, visibility: "hidden" });
  const say = (at) => {
    for (const [one, key] of labels) {
      let best = one.points[one.points.length - 1];
      if (at != null) for (const p of one.points) if (Math.abs(p[0] - at) < Math.abs(best[0] - at)) best = p;
      key.textContent = one.name + " " + (best ? number(best[1], whole ? 0 : digits) : "–");
    }
    where.textContent = at == null ? "" : (times ? "at " : "step ") + x(times ? at : Math.round(at));
  };
  svg.addEventListener("pointermove", (event) => {
    const place = event.offsetX / svg.clientWidth * width;
    const at = x0 + (Math.min(Math.max(place, left), width - right) - left) / (width - left - right) * (x1 - x0);
    line.setAttribute("x1", px(at)); line.setAttribute("x2", px(at)); line.setAttribute("visibility", "visible");
    say(at);
  });
  svg.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); say(null); });
  say(null);
  box.replaceChildren(keys, svg);
}

function lanes() {
  const box = $("lanes"), members = now.members;
  if (!members.length) { box.replaceChildren(make("div", { class: "empty" }, "no process yet")); return; }
  const width = Math.max(260, box.clientWidth), narrow = width < 560;
  const left = narrow ? 92 : 130, right = 10, row = 22, top = 4;
  const begin = Math.min(now.began ?? Infinity, ...members.flatMap((m) => m.lives.map((l) => l.began)));
  const end = Math.max(now.ended ?? now.now, begin + 1), height = top + (members.length + 1) * row + 22;
  const px = (at) => left + (at - begin) / (end - begin) * (width - left - right);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "when each process lived");
  for (const at of timeTicks(end - begin, (width - left) / 80)) {
    const place = px(begin + at);
    draw(svg, "line", { class: "grid", x1: place, x2: place, y1: top, y2: height - 20 });
    draw(svg, "text", { x: place, y: height - 6, "text-anchor": place > width - 24 ? "end" : at ? "middle" : "start" }, span(at));
  }
  const most = narrow ? 14 : 20;
  const name = (text, y) => {
    const label = draw(svg, "text", { class: "name", x: 0, y: y + 15 }, text.length > most ? text.slice(0, most - 1) + "…" : text);
    draw(label, "title", {}, text);
  };
  name("faults", top);
  for (const fault of now.faults) {
    const x = px(fault.at), y = top + 5;
    if (fault.at < begin) continue;
    const mark = draw(svg, "path", { class: "strike", d: `M${x - 4} ${y} h8 l-4 9 z` });
    draw(mark, "title", {}, what(fault) + ", " + since(fault.at));
  }
  members.forEach((member, place) => {
    const y = top + (place + 1) * row;
    name(narrow ? member.name.replace(/^trainer /, "") : member.name, y);
    member.lives.forEach((life, at) => {
      const a = px(life.began), b = px(life.ended ?? end), next = member.lives[at + 1];
      const bar = draw(svg, "rect", { class: life.ended == null ? "life" : "life over", x: a, y: y + 5, width: Math.max(1.5, b - a), height: 12, rx: 2 });
      draw(bar, "title", {}, `${member.name}, pid ${life.pid}: ${since(life.began)} to ${life.ended == null ? "now" : since(life.ended)} ${life.how} ${exit(life.code)}`);
      if (life.ended == null || life.how === "ended") return;
      draw(svg, "line", { class: "down", x1: b, x2: next ? px(next.began) : width - right, y1: y + 11, y2: y + 11 });
      draw(svg, "line", { class: life.how === "stopped" ? "halt" : "death", x1: b, x2: b, y1: y + 2, y2: y + 20 });
    });
    for (const fault of now.faults) if (fault.action === "pause" && fault.member === member.name) {
      const a = px(fault.at), b = px(Math.min(end, fault.at + (fault.length_s ?? fault.healed_s ?? 0)));
      draw(draw(svg, "rect", { class: "paused", x: a, y: y + 5, width: Math.max(2, b - a), height: 12 }), "title", {}, "paused for " + span(fault.length_s));
    }
  });
  $("lane-keys").replaceChildren(...[["up", "alive"], ["bad", "died"], ["idle", "stopped with others"], ["pause", "paused"]]
    .map(([tone, text]) => make("span", { class: "key " + tone }, text)),
    ...(now.spare_nodes.length ? [make("span", {}, "spare: " + now.spare_nodes.join(", "))] : []),
    ...(now.spares ? [make("span", {}, now.spares + " warm interpreter" + (now.spares > 1 ? "s" : ""))] : []));
  box.replaceChildren(svg);
}

const what = (fault) => `${fault.action} ${fault.target}` + (fault.point ? ` at ${fault.point}` : "");
function faults() {
  const recovery = (fault) => [fault.again_s != null ? "back after " + span(fault.again_s) : "",
    fault.healed_s != null ? "next step after " + span(fault.healed_s) : ""].filter(Boolean).join(", ")
    || (fault.gap_s != null ? "steps go on" : "–");
  const rows = now.faults.map((f) => [since(f.at), f.action, f.target, f.step || "–",
    f.lost_s == null ? "–" : number(f.lost_s, 1) + " s", recovery(f), f.by || "nobody", f.point || "–"]);
  const view = [table(["#when", "what", "whom", "#step", "#lost", "recovery", "by", "point"], rows, "no fault so far")];
  const kinds = new Map();
  for (const f of now.faults) {
    const sum = kinds.get(f.kind) ?? [0, 0];
    kinds.set(f.kind, [sum[0] + 1, sum[1] + (f.lost_s ?? 0)]);
  }
  if (kinds.size) view.unshift(make("p", { class: "quiet keys" }, ...[...kinds].sort().map(([kind, [count, lost]]) =>
    make("span", {}, `${kind} ×${count}: ${number(lost, 1)} s`))));
  $("faults").replaceChildren(...view);
  const listed = (title, names) => names.length ? [make("p", { class: "quiet" }, `${title} (${names.length}): ${names.join(", ")}`)] : [];
  $("points").replaceChildren(...listed("Fault points armed and hit", now.points.hit),
    ...listed(now.ended == null ? "Fault points armed, not hit yet" : "Fault points armed, never hit", now.points.never_hit),
    ...listed("Fault points that no fault was aimed at", now.points.not_aimed_at));
}
function versions() {
  const serving = (version) => now.members.filter((m) => m.version === version).map((m) => m.name).join(", ");
  const rows = [...now.versions].reverse().map((v) => [v.version, serving(v.version) || "–",
    v.acknowledged.join(", ") || "–", v.content.slice(0, 10) || "–", since(v.published), size(v.bytes)]);
  $("versions").replaceChildren(table(["#version", "served by", "acknowledged by", "=hash", "#published", "#size"], rows, "none yet"));
}
function jobs() {
  const rows = now.jobs.flatMap(({ job, epochs }) => [...epochs].reverse().map((e) => [job, e.epoch,
    e.ended != null ? e.how || "ended" : e.epoch < epochs[epochs.length - 1].epoch ? "replaced" : e.started == null ? "starting" :
      now.ended != null ? "served to the end" : "serves", e.address || "–", e.host || "–",
    since(e.taken), since(e.started), since(e.ended), e.reason || "–"]));
  $("jobs").replaceChildren(table(["job", "#epoch", "state", "=route", "host", "#taken", "#serves", "#ended", "~reason"], rows, "no trainer yet"));
}
function tiles() {
  const train = now.train[now.train.length - 1], held = now.evals[now.evals.length - 1];
  const up = now.members.filter((m) => m.state === "up").length, newest = now.versions[now.versions.length - 1];
  const lost = now.faults.reduce((sum, f) => sum + (f.lost_s ?? 0), 0);
  const serving = now.members.filter((m) => m.version != null), deaths = now.members.reduce((sum, m) => sum + m.deaths, 0);
  const least = serving.length ? Math.min(...serving.map((m) => m.version)) : null;
  const all = [
    ["step", `${now.step}/${now.steps}`, span(now.pace_s) + " each"],
    ["reward", train ? number(train[1]) : "–", train ? "exact " + number(train[2]) : "not trained yet"],
    ["held-out exact", held ? number(held[1]) : "–", held ? "after step " + held[0] : "not tried yet"],
    ["version", newest ? newest.version : "–", least == null ? "nobody serves" : "served: " + least + (newest && least < newest.version ? ", behind" : "")],
    ["queue", now.queue.depth, now.queue.acknowledged + " consumed"],
    ["members", now.ended != null ? now.members.length : up + "/" + now.members.length, deaths + (deaths === 1 ? " death" : " deaths")],
    ["faults", now.faults_total, span(lost) + " lost"],
    ["time", span((now.ended ?? now.now) - (now.began ?? now.now)), now.resumes ? "resumed ×" + now.resumes : "seed " + now.seed],
  ];
  $("tiles").replaceChildren(...all.map(([title, value, note]) =>
    make("div", { class: "tile" }, make("small", {}, title), make("b", {}, String(value)), make("small", {}, note))));
}
function final() {
  const facts = { ...(now.summary ?? {}), ...(now.final ?? {}) };
  if (!Object.keys(facts).length) return;
  $("final").hidden = false;
  const text = (value) => typeof value === "number" && value % 1 ? value.toFixed(3)
    : typeof value === "object" && value !== null ? JSON.stringify(value) : String(value ?? "–");
  $("final").querySelector(".facts").replaceChildren(...Object.entries(facts).filter(([name]) => !["lost_by_kind", "points"].includes(name))
    .map(([name, value]) => make("div", { class: text(value).length > 20 ? "fact wide" : "fact" },
      make("small", {}, name.replaceAll("_", " ")), text(value))));
}
function choices(id, values) {
  const select = $(id), have = new Set([...select.options].map((option) => option.value));
  for (const value of [...values].sort()) if (!have.has(value) && select.options.length < 200) select.add(new Option(value, value));
}
function events() {
  choices("who", new Set(log.map((e) => e.process)));
  choices("kind", new Set(log.map((e) => e.kind)));
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean), who = $("who").value, kind = $("kind").value;
  const fit = log.filter((e) => (!who || e.process === who) && (!kind || e.kind === kind) &&
    words.every((word) => (e.process + " " + e.kind + " " + e.text).toLowerCase().includes(word)));
  const rows = fit.slice(-MAX_ROWS).reverse().map((e) => [since(e.at), e.process, e.kind, e.text]);
  $("shown").textContent = `${rows.length} of ${fit.length}`;
  $("log").replaceChildren(table(["#when", "process", "type", "~what"], rows, "no such event"));
}
function show() {
  if (!now) return;
  $("run").textContent = now.run;
  document.title = now.run ? `${now.run}: step ${now.step}/${now.steps}` : "holdfast run";
  const state = now.how || (now.began == null ? "waiting" : "running");
  $("state").textContent = state;
  $("state").className = "pill " + state.replace(/[^a-z]/g, "");
  $("done").style.width = (now.steps ? Math.min(100, now.step / now.steps * 100) : 0) + "%";
  $("bar").setAttribute("aria-valuenow", now.step);
  $("bar").setAttribute("aria-valuemax", now.steps);
  const of = (points, at) => points.map((p) => [p[0], p[at]]).filter((p) => p[1] != null);
  const marks = now.faults.map((f) => ({ at: f.step, text: what(f) }));
  const reward = [{ name: "reward", tone: "a", points: of(now.train, 1) }, { name: "exact", tone: "b", points: of(now.train, 2) },
    { name: "held-out exact", tone: "c", points: of(now.evals, 1), dots: true }].filter((one) => one.points.length);
  tiles(); final();
  chart("reward", { series: reward, low: 0, high: 1, marks });
  chart("loss", { series: [{ name: "loss", tone: "a", points: of(now.train, 3) }], digits: 3, marks });
  chart("queue", { series: now.depth.length ? [{ name: "samples that wait", tone: "a", points: now.depth }] : [],
    low: 0, whole: true, times: true, x: (at) => since(at) });
  lanes(); faults(); versions(); jobs(); events();
}
function take(data) {
  log = log.concat(data.log).slice(-MAX_LOG);
  now = data;
  if (!document.hidden) show();
}
function follow() {
  const source = new EventSource("events");
  source.onopen = () => { log = []; $("link").textContent = "live"; };
  source.onmessage = (message) => take(JSON.parse(message.data));
  source.onerror = () => {
    $("link").textContent = now?.ended != null ? "the run has ended" : "no connection, trying again";
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 2000);
  };
}
for (const id of ["find", "who", "kind"]) $(id).addEventListener("input", () => now && events());
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(show, 100); });
document.addEventListener("visibilitychange", () => document.hidden || show());
if ($("data")) take(JSON.parse($("data").textContent)); else follow();
