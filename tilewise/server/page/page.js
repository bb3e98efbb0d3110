"use strict";
(() => {
// ---- who holds which block, from the events of a trace: the bookkeeping of engine/replay.py

class Pool {
  constructor() {
    this.numbers = 0; // of requests, by arrival: what a colour is made of
    this.clear(0, 0);
  }

  clear(numBlocks, blockSize) {
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.counts = new Int32Array(numBlocks);
    this.known = new Uint8Array(numBlocks);
    this.out = new Uint8Array(numBlocks); // what it held last lies in main memory
    this.holders = new Array(numBlocks); // ids of the sequences whose tables have it
    this.tables = new Map();
    this.sampleOf = new Map(); // seq_id -> {name, index}
    this.waiting = new Map(); // "name index" -> {name, index}
    this.requests = new Map(); // name -> {number, user, numTokens, numSamples, arrived}
    this.dirty = new Set();
    this.isWhole = true; // everything is to be drawn
    this.used = 0;
  }

  load(picture) {
    this.clear(picture.num_blocks, picture.block_size);
    for (const request of picture.requests) this.arrived(request, request.time);
    for (const [block, owners] of picture.counts) this.counts[block] = owners;
    this.used = picture.counts.length;
    for (const block of picture.known) this.known[block] = 1;
    for (const table of picture.tables) {
      this.sampleOf.set(table.seq_id, { name: table.request_id, index: table.index });
      this.put(table.seq_id, 0, table.blocks);
    }
    for (const [name, index] of picture.waiting) this.wait(name, index);
  }

  take(event) {
    const method = Object.hasOwn(HANDLERS, event.kind) ? HANDLERS[event.kind] : null;
    if (method) method(this, event);
  }

  arrived(event, time) {
    this.requests.set(event.request_id, {
      number: this.numbers++, user: event.user, numTokens: event.num_tokens,
      numSamples: event.num_samples, arrived: time,
    });
  }

  request(name) {
    if (!this.requests.has(name)) { // it came before the first event that is still known
      this.arrived({ request_id: name, user: "", num_tokens: null, num_samples: null }, null);
    }
    return this.requests.get(name);
  }

  wait(name, index) { this.waiting.set(name + " " + index, { name, index }); }

  grow(block) {
    if (block < this.numBlocks) return;
    const longer = (old, Kind) => {
      const made = new Kind(block + 1);
      made.set(old);
      return made;
    };
    this.counts = longer(this.counts, Int32Array);
    this.known = longer(this.known, Uint8Array);
    this.out = longer(this.out, Uint8Array);
    this.holders.length = this.numBlocks = block + 1;
    this.isWhole = true;
  }

  own(blocks) {
    for (const block of blocks) {
      if (block < 0) continue;
      this.grow(block);
      if (this.counts[block]++ === 0) this.used++;
      this.out[block] = 0;
      this.dirty.add(block);
    }
  }

  free(blocks) {
    for (const block of blocks) {
      this.grow(block);
      if (this.counts[block] > 0 && --this.counts[block] === 0) this.used--;
      this.dirty.add(block);
    }
  }

  hold(block, seq) {
    if (block < 0) return;
    this.grow(block);
    (this.holders[block] ??= []).push(seq);
    this.dirty.add(block);
  }

  leave(block, seq) {
    const holders = block >= 0 && this.holders[block];
    if (!holders) return;
    const place = holders.indexOf(seq);
    if (place >= 0) holders.splice(place, 1);
    if (!holders.length) this.holders[block] = undefined;
    this.dirty.add(block);
  }

  put(seq, place, blocks) {
    let table = this.tables.get(seq);
    if (!table) this.tables.set(seq, (table = []));
    while (table.length < place) table.push(-1);
    blocks.forEach((block, i) => {
      const old = table[place + i];
      if (old === block) return;
      if (old !== undefined) this.leave(old, seq);
      table[place + i] = block;
      this.hold(block, seq);
    });
  }

  drop(seq) {
    for (const block of this.tables.get(seq) ?? []) this.leave(block, seq);
    this.tables.delete(seq);
  }

  mark(blocks, value) {
    for (const block of blocks) {
      this.grow(block);
      this.known[block] = value;
      this.dirty.add(block);
    }
  }

  forgetEnded() {
    const live = new Set();
    for (const seq of this.tables.keys()) live.add(this.sampleOf.get(seq)?.name);
    for (const { name } of this.waiting.values()) live.add(name);
    for (const name of this.requests.keys()) if (!live.has(name)) this.requests.delete(name);
  }

  // What a block is: the name of its only request, or one of the marks.
  stateOf(block) {
    const holders = this.holders[block];
    if (holders) {
      const name = this.sampleOf.get(holders[0])?.name;
      for (let i = 1; i < holders.length; i++) {
        if (this.sampleOf.get(holders[i])?.name !== name) return SHARED;
      }
      return name ?? PENDING;
    }
    if (this.counts[block]) return PENDING;
    if (this.known[block]) return CACHED;
    return this.out[block] ? SWAPPED : FREE;
  }

  copy() {
    const made = Object.assign(new Pool(), this);
    for (const name of ["counts", "known", "out"]) made[name] = this[name].slice();
    made.holders = this.holders.map((list) => list && list.slice());
    made.tables = new Map([...this.tables].map(([seq, table]) => [seq, table.slice()]));
    for (const name of ["sampleOf", "waiting", "requests"]) made[name] = new Map(this[name]);
    made.dirty = new Set();
    made.isWhole = true;
    return made;
  }
}

const [SHARED, PENDING, CACHED, SWAPPED, FREE] = [1, 2, 3, 4, 5]; // names of requests are strings

const HANDLERS = {
  pool: (p, e) => p.clear(e.num_blocks, e.block_size),
  arrive: (p, e) => {
    p.arrived(e, e.time);
    p.wait(e.request_id, 0);
  },
  admit: (p, e) => {
    p.request(e.request_id);
    p.sampleOf.set(e.seq_id, { name: e.request_id, index: e.index });
    p.waiting.delete(e.request_id + " " + e.index);
    p.drop(e.seq_id);
    p.put(e.seq_id, 0, e.blocks);
    p.own(e.blocks);
    p.mark(e.blocks.slice(0, e.num_found).filter((block) => block >= 0), 1); // those that came back from main memory, too
  },
  fork: (p, e) => {
    const table = p.tables.get(e.seq_id) ?? [];
    const parent = p.sampleOf.get(e.seq_id);
    if (parent) p.sampleOf.set(e.child, { name: parent.name, index: e.index });
    p.put(e.child, 0, table);
    p.own(table);
  },
  extend: (p, e) => {
    p.put(e.seq_id, (p.tables.get(e.seq_id) ?? []).length, e.blocks);
    p.own(e.blocks);
  },
  copy: (p, e) => {
    p.put(e.seq_id, e.place, [e.block]);
    p.own([e.block]);
  },
  // A window has passed its first blocks.
  pass: (p, e) => p.put(e.seq_id, 0, Array(e.num_passed).fill(-1)),
  hit: (p, e) => {
    p.put(e.seq_id, e.place, e.blocks);
    p.own(e.blocks);
  },
  register: (p, e) => {
    p.own(e.kept.filter((block, i) => block !== e.blocks[i]));
    p.put(e.seq_id, e.place, e.kept);
    p.mark(e.kept, 1);
  },
  free: (p, e) => p.free(e.blocks),
  evict: (p, e) => p.mark([e.block], 0),
  forget: (p, e) => p.mark(e.blocks, 0),
  reset: (p) => {
    p.known.fill(0);
    p.isWhole = true;
  },
  swap_out: (p, e) => {
    for (const block of e.blocks) {
      p.grow(block);
      p.out[block] = 1;
      p.dirty.add(block);
    }
  },
  preempt: (p, e) => {
    const sample = p.sampleOf.get(e.seq_id);
    if (sample) p.wait(sample.name, sample.index);
    p.drop(e.seq_id);
  },
  finish: (p, e) => {
    p.waiting.delete(e.request_id + " " + e.index);
    p.drop(e.seq_id);
    p.sampleOf.delete(e.seq_id);
  },
};

// ---- what happened each second

const SECONDS = 180;
const SERIES = ["decode", "prompt", "admitted", "found", "preempt", "swap"];

class Rates {
  constructor() { this.clear(); }

  clear() {
    this.at = new Map(); // second -> what happened in it
    this.last = -Infinity;
  }

  take(e) {
    const second = Math.floor(e.time);
    let row = this.at.get(second);
    if (!row) {
      this.at.set(second, (row = Object.fromEntries(SERIES.map((name) => [name, 0]))));
      this.last = Math.max(this.last, second);
      for (const old of this.at.keys()) if (old < this.last - SECONDS) this.at.delete(old);
    }
    if (e.kind === "schedule") {
      let prompt = 0;
      for (let i = 1; i < e.prompts.length; i += 2) prompt += e.prompts[i];
      row.prompt += prompt;
      row.decode += e.num_tokens - prompt;
    } else if (e.kind === "admit") {
      row.admitted += e.blocks.length;
      row.found += e.num_found;
    } else if (e.kind === "preempt") row.preempt++;
    else if (e.kind === "swap_out" || e.kind === "swap_in") row.swap += e.blocks.length;
  }

  series(name, now) {
    const values = [];
    for (let second = Math.floor(now) - SECONDS; second < Math.floor(now); second++) {
      values.push(this.at.get(second)?.[name] ?? 0);
    }
    return values;
  }
}

// ---- server-sent events by fetch: EventSource cannot send a header

async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      let kind = "message", data = "";
      for (const line of rest.slice(0, end).split("\n")) {
        if (line.startsWith("event:")) kind = line.slice(6).trim();
        else if (line.startsWith("data:")) data += line.slice(5).trim();
      }
      rest = rest.slice(end + 2);
      if (data) yield { kind, data };
    }
  }
}

if (typeof document === "undefined") { // a test without a browser
  module.exports = { Pool, Rates, messages, SHARED, PENDING, CACHED, SWAPPED, FREE };
  return;
}

const KEY = "tilewise-key";
const $ = (id) => document.getElementById(id);
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const make = (tag, text = "") => Object.assign(document.createElement(tag), { textContent: text });
const dark = matchMedia("(prefers-color-scheme: dark)");

function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  if (key) headers.authorization = "Bearer " + key;
  return fetch(path, { ...options, headers });
}

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return "status " + answer.status;
  }
}

let pool = new Pool();
let rates = new Rates();
let clock = { time: 0, at: performance.now() }; // of the engine, and when it was that here
let film = null; // a recorded trace instead of the live one
let chosen = -1; // block
let chosenRequest = null;
const told = new Map(); // request -> what /v1/explain says

const now = () => film ? film.time : clock.time + (performance.now() - clock.at) / 1000;

// ---- the map

const canvas = $("map");
const pen = canvas.getContext("2d", { alpha: false });
let grid = { cell: 8, columns: 1, gap: 1 };
let colours = {};
let isDark = null; // what the colours are for

function theme() {
  isDark = dark.matches;
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue("--" + name).trim();
  colours = {
    ground: of("card"), text: of("text"), accent: of("accent"),
    [SHARED]: of("shared"), [PENDING]: of("pending"), [CACHED]: of("cached"),
    [SWAPPED]: of("swapped"), [FREE]: of("free"),
  };
  ownColours.clear();
  pool.isWhole = true;
}

const ownColours = new Map();
function colourOf(state) {
  if (typeof state === "number") return colours[state];
  const number = pool.requests.get(state)?.number ?? 0;
  let colour = ownColours.get(number % 360);
  if (!colour) {
    const hue = Math.round((number % 360) * 137.508) % 360;
    colour = `hsl(${hue} ${dark.matches ? "52% 58%" : "62% 46%"})`;
    ownColours.set(number % 360, colour);
  }
  return colour;
}

function layout() {
  const width = Math.max(60, $("frame").clientWidth);
  const count = Math.max(1, pool.numBlocks);
  const room = width * Math.max(220, innerHeight * 0.5);
  const cell = Math.max(3, Math.min(26, Math.floor(Math.sqrt(room / count))));
  const columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.ceil(count / columns);
  const ratio = Math.min(2, devicePixelRatio || 1);
  grid = { cell, columns, rows, gap: cell >= 6 ? 1 : 0.5, ratio };
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(rows * cell * ratio);
  canvas.style.height = rows * cell + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pool.isWhole = true;
}

function cellOf(block) {
  const x = (block % grid.columns) * grid.cell;
  return [x, Math.floor(block / grid.columns) * grid.cell];
}

function draw() {
  if (dark.matches !== isDark) theme(); // asked here, when the styles are those of this frame
  if (grid.blocks !== pool.numBlocks) {
    layout();
    grid.blocks = pool.numBlocks;
  }
  let blocks = pool.dirty;
  if (pool.isWhole) {
    pen.fillStyle = colours.ground;
    pen.fillRect(0, 0, canvas.width, canvas.height);
    blocks = Array.from({ length: pool.numBlocks }, (_, i) => i);
  }
  if (pool.isWhole || blocks.size) {
    const byColour = new Map();
    for (const block of blocks) {
      const colour = colourOf(pool.stateOf(block));
      const list = byColour.get(colour);
      if (list) list.push(block);
      else byColour.set(colour, [block]);
    }
    const size = grid.cell - grid.gap;
    for (const [colour, list] of byColour) {
      pen.fillStyle = colour;
      for (const block of list) {
        const [x, y] = cellOf(block);
        pen.fillRect(x, y, size, size);
      }
    }
    for (const block of blocks) {
      const holders = pool.holders[block];
      if (holders && holders.length > 1) drawCount(block, holders.length, size);
    }
    pool.dirty.clear();
    pool.isWhole = false;
  }
  drawChoice();
}

function drawCount(block, count, size) {
  const [x, y] = cellOf(block);
  const isShared = pool.stateOf(block) === SHARED;
  pen.fillStyle = isShared ? colours.ground : dark.matches ? "#000" : "#fff";
  if (size >= 13) {
    pen.font = `600 ${Math.round(size * 0.6)}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(count > 99 ? "∗" : count, x + size / 2, y + size / 2 + 0.5);
  } else if (size >= 4) {
    const dot = Math.max(1, size / 3);
    pen.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
  }
}

let framed = -1;
function drawChoice() {
  if (framed >= 0 && framed !== chosen && framed < pool.numBlocks) {
    const [x, y] = cellOf(framed);
    pen.fillStyle = colours.ground;
    pen.fillRect(x - 2, y - 2, grid.cell + 3, grid.cell + 3);
    for (const d of [-grid.columns - 1, -grid.columns, -grid.columns + 1, -1, 0, 1,
      grid.columns - 1, grid.columns, grid.columns + 1]) {
      if (framed + d >= 0 && framed + d < pool.numBlocks) pool.dirty.add(framed + d);
    }
    framed = chosen;
    draw();
    return;
  }
  framed = chosen;
  if (chosen < 0 || chosen >= pool.numBlocks) return;
  const [x, y] = cellOf(chosen);
  pen.strokeStyle = colours.accent;
  pen.lineWidth = 2;
  pen.strokeRect(x, y, grid.cell - grid.gap, grid.cell - grid.gap);
}

function choose(block) {
  if (!pool.numBlocks) return;
  chosen = Math.max(0, Math.min(pool.numBlocks - 1, block));
  chosenRequest = null;
  detail();
}

canvas.addEventListener("click", (event) => {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / grid.cell);
  const row = Math.floor((event.clientY - box.top) / grid.cell);
  const block = row * grid.columns + column;
  if (column < grid.columns && block < pool.numBlocks) choose(block);
});
canvas.addEventListener("keydown", (event) => {
  const step = {
    ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns,
    PageUp: -10 * grid.columns, PageDown: 10 * grid.columns,
    Home: -pool.numBlocks, End: pool.numBlocks,
  }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  choose(chosen < 0 ? 0 : chosen + step);
});

const MARKS = {
  [PENDING]: "held by a step that is unfinished",
  [CACHED]: "free; the prefix cache finds it",
  [SWAPPED]: "free; what it held lies in main memory",
  [FREE]: "free",
};
let detailText = "";

function detail() {
  const box = $("detail");
  const lines = [];
  let title;
  if (chosenRequest !== null) {
    title = "Request " + chosenRequest;
    lines.push(about(chosenRequest));
    let blocks = 0;
    for (const [seq, table] of pool.tables) {
      const sample = pool.sampleOf.get(seq);
      if (sample?.name !== chosenRequest) continue;
      blocks += table.length;
      lines.push(`sample ${sample.index}: ${table.length} blocks`);
    }
    if (!blocks) lines.push("holds no block");
  } else if (chosen >= 0 && chosen < pool.numBlocks) {
    const state = pool.stateOf(chosen);
    const holders = pool.holders[chosen] ?? [];
    const sharers = holders.length > 1 ? `, ${holders.length} sharers` : "";
    title = `Block ${chosen}: ${MARKS[state] ?? "in use" + sharers}`;
    if (holders.length && pool.known[chosen]) title += "; the prefix cache finds it";
    for (const seq of holders.slice(0, 12)) {
      const sample = pool.sampleOf.get(seq);
      const table = pool.tables.get(seq) ?? [];
      const place = table.indexOf(chosen) + 1;
      const where = `block ${place} of ${table.length}`;
      lines.push(`${sample?.name ?? "unknown"}, sample ${sample?.index ?? "?"}, ${where}; ` +
        about(sample?.name));
    }
    if (holders.length > 12) lines.push(`and ${holders.length - 12} more`);
  } else return;
  const text = [title, ...lines].join("\n");
  if (text === detailText) return; // else a screen reader says it again and again
  detailText = text;
  const list = make("ul");
  for (const line of lines) list.append(make("li", line));
  box.replaceChildren(make("strong", title), list);
}

function about(name) {
  const request = pool.requests.get(name);
  if (!request) return "not in the engine any more";
  const known = told.get(name);
  const parts = [];
  if (request.numTokens !== null) parts.push(`${request.numTokens} prompt tokens`);
  if (known?.num_generated_tokens !== undefined) {
    parts.push(`${known.num_generated_tokens} generated`, `${known.num_cached_tokens} cached`);
    if (known.num_preemptions) parts.push(`${known.num_preemptions} preemptions`);
  }
  if (request.user) parts.push("user " + request.user);
  return parts.join(", ");
}

// ---- queue and rates, once a second

const number = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
const seconds = (value) => value < 1 ? Math.round(value * 1000) + " ms" : value.toFixed(1) + " s";
const ttfts = [];

function chart(name, values, shown) {
  const top = Math.max(1e-9, ...values);
  const step = 180 / Math.max(1, values.length - 1);
  const path = values.map((v, i) => `${i ? "L" : "M"}${(i * step).toFixed(1)} ` +
    (38 - 36 * v / top).toFixed(1));
  const svg = $("c-" + name);
  svg.firstElementChild.setAttribute("d", path.join(""));
  $("v-" + name).textContent = shown;
}

function tiles() {
  const series = Object.fromEntries(SERIES.map((name) => [name, rates.series(name, now())]));
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const recent = (list) => sum(list.slice(-5)) / 5;
  chart("decode", series.decode, number(recent(series.decode)));
  chart("prompt", series.prompt, number(recent(series.prompt)));
  let share = 0;
  const shares = series.admitted.map((all, i) => all ? (share = series.found[i] / all) : share);
  const admitted = sum(series.admitted);
  const hit = admitted ? (100 * sum(series.found) / admitted).toFixed(0) + " %" : "–";
  chart("hit", shares, hit);
  chart("preempt", series.preempt, sum(series.preempt));
  chart("swap", series.swap, sum(series.swap).toLocaleString("en"));
  const last = ttfts.findLast((value) => value !== null);
  if (film) chart("ttft", [0], "–");
  else chart("ttft", ttfts.map((v) => v ?? 0), last === undefined ? "–" : seconds(last));
  const count = pool.numBlocks;
  const percent = count ? (100 * pool.used / count).toFixed(0) : 0;
  $("usage").textContent = `${pool.used.toLocaleString("en")} of ${count.toLocaleString("en")} ` +
    `in use (${percent} %), ${pool.blockSize} tokens each`;
  canvas.setAttribute("aria-label", "Map of the cache blocks: " + $("usage").textContent);
}

const MOST_LISTED = 60;

function lists() {
  pool.forgetEnded();
  for (const name of told.keys()) if (!pool.requests.has(name)) told.delete(name);
  const running = new Map();
  for (const [seq, table] of pool.tables) {
    const name = pool.sampleOf.get(seq)?.name;
    if (name === undefined) continue;
    const entry = running.get(name) ?? { samples: 0, blocks: 0 };
    entry.samples++;
    entry.blocks += table.length;
    running.set(name, entry);
  }
  const waiting = new Map();
  for (const { name } of pool.waiting.values()) waiting.set(name, (waiting.get(name) ?? 0) + 1);
  $("n-waiting").textContent = waiting.size;
  $("n-running").textContent = running.size;
  fill($("waiting"), waiting, (name) => {
    const request = pool.request(name);
    const known = told.get(name);
    const age = request.arrived === null ? "" : `for ${seconds(Math.max(0, now() - request.arrived))}`;
    if (known?.state !== "waiting") return `waits ${age}`;
    const behind = known.behind.length ? `; behind ${known.behind.slice(0, 2).map(short).join(", ")}` +
      (known.num_behind > 2 ? ` and ${known.num_behind - 2} more` : "") : "";
    return `${known.waits_for.replace("waiting: ", "")}; ${age}${behind}`;
  });
  fill($("running"), running, (name, entry) => {
    const known = told.get(name);
    const text = `${entry.blocks} blocks, ${entry.samples} sample${entry.samples > 1 ? "s" : ""}`;
    return known?.state === "running" ? `${text}; ${known.waits_for.replace("running: ", "")}` : text;
  });
}

const short = (name) => name.length > 18 ? name.slice(0, 12) + "…" + name.slice(-4) : name;

function fill(list, entries, say) {
  const shown = [...entries].slice(0, MOST_LISTED);
  const old = new Map([...list.children].map((item) => [item.dataset.name, item]));
  shown.forEach(([name, entry], place) => {
    let item = old.get(name);
    old.delete(name);
    if (!item) { // an item stays the same one, so that the keyboard's focus stays
      item = make("li");
      item.dataset.name = name;
      const button = make("button");
      button.type = "button";
      button.append(make("i"), make("span"), make("small"));
      button.addEventListener("click", () => {
        chosenRequest = name;
        chosen = -1;
        detail();
        lists();
      });
      item.append(button);
    }
    const [dot, label, why] = item.firstElementChild.children;
    dot.style.background = colourOf(name);
    const request = pool.request(name);
    const size = request.numTokens === null ? "" : ` · ${request.numTokens} tokens`;
    label.textContent = short(name) + (request.user ? ` · ${request.user}` : "") + size;
    why.textContent = say(name, entry);
    item.firstElementChild.title = name;
    item.firstElementChild.setAttribute("aria-pressed", String(chosenRequest === name));
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
  });
  for (const item of old.values()) item.remove();
  while (list.children.length > shown.length) list.lastChild.remove();
}

// Asks for those that can be seen, a few at a time.
async function explainSome() {
  const names = new Set();
  if (chosenRequest) names.add(chosenRequest);
  for (const seq of (pool.holders[chosen] ?? []).slice(0, 4)) names.add(pool.sampleOf.get(seq)?.name);
  for (const id of ["waiting", "running"]) {
    for (const item of [...$(id).children].slice(0, 8)) names.add(item.dataset.name);
  }
  const explain = async (name) => {
    // A request of several prompts is one job, whose parts end in -1, -2 ...
    for (const job of new Set([name, name.replace(/-\d+$/, "")])) {
      const answer = await ask("/v1/explain/" + encodeURIComponent(job));
      if (!answer.ok) continue;
      for (const one of (await answer.json()).prompts) told.set(one.request_id, one);
      return;
    }
  };
  if (!document.hidden) await Promise.all([...names].filter(Boolean).map(explain));
}

let before = null;
async function readMetrics() {
  const answer = await ask("/metrics");
  if (!answer.ok) return;
  const read = {};
  for (const line of (await answer.text()).split("\n")) {
    const found = /^tilewise:time_to_first_token_seconds_(sum|count)\{[^}]*\} (\S+)/.exec(line);
    if (found) read[found[1]] = Number(found[2]);
  }
  if (before && read.count !== undefined) {
    const count = read.count - before.count;
    ttfts.push(count > 0 ? (read.sum - before.sum) / count : null);
    if (ttfts.length > 90) ttfts.shift();
  }
  before = read;
}

async function everySecond() {
  for (let turn = 0; ; turn++) {
    try {
      if (!document.hidden) {
        if (!film && isFollowing) await explainSome();
        tiles();
        lists();
        detail();
      }
      if (!film && turn % 2 === 0) await readMetrics();
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // the server does not answer: status says so
    }
    await wait(1000);
  }
}

// ---- live

let isFollowing = false;
let livePool = pool;
let liveRates = rates;

function say(text, isBad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", isBad);
}

async function follow() {
  for (;;) {
    try {
      const answer = await ask("/v1/events");
      if (answer.ok) {
        for await (const { kind, data } of messages(answer.body)) {
          receive(kind, JSON.parse(data));
          isFollowing = true;
          if (!film) say("live");
        }
      } else if (answer.status === 403) {
        say("the map needs an administrator's key");
        return;
      } else if (answer.status === 401) {
        say("the key is not known any more", true);
        return;
      } else say(await problem(answer), true);
    } catch (error) {
      if (!(error instanceof TypeError) && error.name !== "AbortError") throw error;
    }
    isFollowing = false;
    if (!film) say("not connected, trying again", true);
    await wait(2000);
  }
}

// What happened before the page was opened, for the rates.
const PAST = 8000; // events
let isPastRead = false;
async function readPast(next) {
  if (isPastRead) return;
  isPastRead = true;
  const answer = await ask(`/v1/trace?since=${Math.max(0, next - PAST)}&limit=${PAST}`);
  if (!answer.ok) return;
  for (const event of (await answer.json()).data) if (event.number < next) liveRates.take(event);
}

function receive(kind, data) {
  if (kind === "picture") {
    livePool.load(data);
    clock = { time: data.time, at: performance.now() };
    tiles();
    lists();
    readPast(data.next).catch(() => {}); // the rates then begin with now
    return;
  }
  for (const event of data) {
    livePool.take(event);
    liveRates.take(event);
  }
  const last = data.at(-1).time;
  if (last > clock.time + (performance.now() - clock.at) / 1000) {
    clock = { time: last, at: performance.now() };
  }
}

// ---- a recorded trace

const SHOTS = 40; // copies on the way, from which to go on

async function openFile(file) {
  let events;
  try {
    const text = await file.text();
    let whole = null;
    try {
      whole = JSON.parse(text); // an answer of /v1/trace
    } catch {
      whole = null;
    }
    events = Array.isArray(whole?.data) ? whole.data
      : text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
    if (!events.length || events.some((e) => typeof e?.kind !== "string" || !(e.time >= 0))) throw 0;
  } catch {
    say(`${file.name} is no trace: it must hold one event a line`, true);
    return;
  }
  film = { name: file.name, events, place: 0, time: events[0].time, shots: [], isPlaying: false };
  film.every = Math.max(500, Math.ceil(events.length / SHOTS));
  pool = new Pool();
  rates = new Rates();
  chosen = -1;
  chosenRequest = null;
  $("detail").textContent = detailText = "Choose a block to see whose it is.";
  $("film").hidden = false;
  $("scrub").max = events.length;
  say("recorded: " + file.name);
  seek(events.length);
}

function seek(place) {
  const { events, shots, every } = film;
  if (place < film.place) {
    const shot = shots[Math.min(shots.length - 1, Math.floor(place / every) - 1)];
    pool = shot ? shot.pool.copy() : new Pool();
    film.place = shot ? shot.place : 0;
  }
  while (film.place < place) {
    pool.take(events[film.place++]);
    if (film.place % every === 0 && shots.length < film.place / every) {
      shots.push({ place: film.place, pool: pool.copy() });
    }
  }
  film.time = events[Math.max(0, place - 1)].time;
  rates.clear();
  let first = place;
  while (first > 0 && events[first - 1].time > film.time - SECONDS) first--;
  for (let i = first; i < place; i++) rates.take(events[i]);
  const passed = film.time - events[0].time;
  $("scrub").value = place;
  $("scrub").setAttribute("aria-valuetext", `event ${place}, ${passed.toFixed(2)} s`);
  $("moment").textContent = `${passed.toFixed(2)} s, event ${place} of ${events.length}`;
  tiles();
  lists();
  detail();
}

function play(isPlaying) {
  if (!film) return;
  if (isPlaying && film.place >= film.events.length) seek(0);
  film.isPlaying = isPlaying;
  film.shownAt = performance.now();
  film.playTime = film.time;
  $("play").textContent = isPlaying ? "Pause" : "Play";
}

function advance(at) {
  film.playTime += (at - film.shownAt) / 1000 * Number($("speed").value);
  film.shownAt = at;
  let place = film.place;
  while (place < film.events.length && film.events[place].time <= film.playTime) place++;
  if (place > film.place) seek(place);
  if (place >= film.events.length) play(false);
}

$("file").addEventListener("change", () => {
  const [file] = $("file").files;
  if (file) openFile(file);
  $("file").value = "";
});
$("scrub").addEventListener("input", () => {
  play(false);
  seek(Number($("scrub").value));
});
$("play").addEventListener("click", () => play(!film.isPlaying));
$("live").addEventListener("click", () => {
  film = null;
  [pool, rates] = [livePool, liveRates];
  pool.isWhole = true;
  $("film").hidden = true;
  say(isFollowing ? "live" : "connecting");
});

// ---- playground

let running = null;
$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const count = Number($("n").value);
  const boxes = Array.from({ length: count }, (_, i) => {
    const box = make("div");
    box.className = "sample";
    box.append(make("small", `sample ${i + 1}`), make("span"));
    return box;
  });
  $("samples").replaceChildren(...boxes);
  const begun = performance.now();
  let first = null, tokens = 0;
  try {
    const answer = await ask("/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal: running.signal,
      body: JSON.stringify({
        prompt: $("prompt").value, n: count, max_tokens: Number($("max").value),
        temperature: Number($("temperature").value), stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!answer.ok) throw new Error(await problem(answer));
    for await (const { data } of messages(answer.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      first ??= performance.now() - begun;
      for (const choice of chunk.choices) {
        const [label, text] = boxes[choice.index].children;
        text.append(choice.text);
        if (choice.finish_reason) label.textContent += ` · ${choice.finish_reason}`;
      }
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
    }
    const passed = (performance.now() - begun) / 1000;
    $("play-told").textContent = `${tokens} tokens in ${seconds(passed)}, ` +
      `first after ${seconds((first ?? 0) / 1000)}`;
  } catch (error) {
    $("play-told").textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
});
$("stop").addEventListener("click", () => running?.abort());

// ---- begin

if (sessionStorage.getItem(KEY)) $("leave").hidden = false;
$("leave").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
new ResizeObserver(() => { grid.blocks = -1; }).observe($("frame"));
theme();
function frame(at) {
  if (film?.isPlaying) advance(at);
  draw();
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
follow();
everySecond();
})();
