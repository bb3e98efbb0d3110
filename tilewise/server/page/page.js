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
    this.parent = new Int32Array(numBlocks).fill(-1); // the block before it in its prefix
    this.idleSince = new Float64Array(numBlocks); // counts up: the lowest is evicted next
    this.level = new Uint8Array(numBlocks); // of that order, 0 is evicted first
    this.clock = 0;
    this.isOrderNew = this.isTreeNew = true;
    this.budget = 0; // tokens of a step; 0 where nobody told it, as in a recorded trace
    this.largest = 0; // of the steps so far
    this.step = null; // the last one: {prompt, decode, sequences}
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
    picture.known.forEach((block, i) => {
      this.known[block] = 1;
      this.parent[block] = picture.parents?.[i] ?? -1;
    });
    for (const block of picture.order ?? []) this.idleSince[block] = ++this.clock;
    this.budget = picture.budget ?? 0;
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
    this.level = longer(this.level, Uint8Array);
    this.idleSince = longer(this.idleSince, Float64Array);
    this.parent = longer(this.parent, Int32Array);
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
    for (let i = blocks.length - 1; i >= 0; i--) { // the last of a prefix is evicted first
      const block = blocks[i];
      this.grow(block);
      if (this.counts[block] > 0 && --this.counts[block] === 0) {
        this.used--;
        this.idleSince[block] = ++this.clock;
        this.isOrderNew = true;
      }
      this.dirty.add(block);
    }
  }

  // Blocks of a table that can be found: each follows the one before it in the table.
  follow(seq, place, count) {
    const table = this.tables.get(seq) ?? [];
    for (let i = place; i < place + count; i++) this.parent[table[i]] = i ? table[i - 1] : -1;
    this.isTreeNew = true;
  }

  // Whoever is free and can be found, the next to be evicted first. Of 100,000 blocks it must not
  // take a frame: numbers in typed arrays sort several times as fast as objects do.
  evictionOrder() {
    const all = this.numBlocks, keys = new Float64Array(all);
    let count = 0;
    for (let block = 0; block < all; block++) {
      if (this.known[block] && !this.counts[block]) keys[count++] = this.idleSince[block] * all + block;
    }
    const order = new Int32Array(count);
    keys.subarray(0, count).sort().forEach((key, i) => { order[i] = key % all; });
    return order;
  }

  // How many of them are before a block, itself included, and how many there are.
  evictionPlace(block) {
    let before = 0, count = 0;
    for (let other = 0; other < this.numBlocks; other++) {
      if (!this.known[other] || this.counts[other]) continue;
      count++;
      if (this.idleSince[other] <= this.idleSince[block]) before++;
    }
    return [before, count];
  }

  // Gives each of them its step of the gradient; those that change are drawn again.
  grade() {
    this.isOrderNew = false;
    const give = (block, level) => {
      if (this.level[block] === level) return;
      this.level[block] = level;
      this.dirty.add(block);
    };
    if (this.numBlocks <= SORTED) {
      const order = this.evictionOrder();
      order.forEach((block, i) => give(block, Math.floor(LEVELS * i / order.length)));
      return;
    }
    // To sort would take several frames: of many blocks a step is a span of the count instead.
    let low = Infinity, high = -Infinity;
    const isIdle = (block) => this.known[block] && !this.counts[block];
    for (let block = 0; block < this.numBlocks; block++) {
      if (!isIdle(block)) continue;
      low = Math.min(low, this.idleSince[block]);
      high = Math.max(high, this.idleSince[block]);
    }
    for (let block = 0; block < this.numBlocks; block++) {
      if (isIdle(block)) give(block, Math.floor(LEVELS * (this.idleSince[block] - low) / (high - low + 1)));
    }
  }

  // The trees as rows of cells: {block, depth, row, up}, `up` the row that a branch leaves. The
  // largest come first, and only so many rows are made; the counts are of all.
  grove(mostRows) {
    this.isTreeNew = false;
    const all = this.numBlocks, { known, parent } = this;
    const first = new Int32Array(all).fill(-1), next = new Int32Array(all).fill(-1); // children
    const missing = new Int32Array(all); // children whose sizes are not known yet
    const sizes = new Int32Array(all), heights = new Int32Array(all);
    const isRoot = (block) => parent[block] < 0 || !known[parent[block]];
    let count = 0, trees = 0, rows = 0, longest = 0;
    for (let block = 0; block < all; block++) {
      if (!known[block]) continue;
      count++;
      if (isRoot(block)) trees++;
      else {
        next[block] = first[parent[block]];
        first[parent[block]] = block;
        missing[parent[block]]++;
      }
    }
    const ready = new Int32Array(count); // blocks after all of their children
    let end = 0;
    for (let block = 0; block < all; block++) {
      if (known[block] && first[block] < 0) ready[end++] = block;
    }
    rows = end; // each row ends with a leaf
    const keys = new Float64Array(trees);
    for (let i = 0, found = 0; i < end; i++) {
      const block = ready[i];
      sizes[block]++;
      heights[block]++;
      if (isRoot(block)) {
        longest = Math.max(longest, heights[block]);
        keys[found++] = -sizes[block] * all + block; // the larger first, then by number
        continue;
      }
      const up = parent[block];
      sizes[up] += sizes[block];
      heights[up] = Math.max(heights[up], heights[block]);
      if (--missing[up] === 0) ready[end++] = up;
    }
    keys.sort();
    const cells = [];
    let row = 0;
    for (let i = 0; i < trees && row < mostRows; i++) {
      const root = ((keys[i] % all) + all) % all;
      const stack = [{ block: root, depth: 0, up: -1 }];
      while (stack.length && row < mostRows) {
        let { block, depth, up } = stack.pop();
        for (; block >= 0; up = -1) {
          cells.push({ block, depth: depth++, row, up });
          const children = [];
          for (let child = first[block]; child >= 0; child = next[child]) children.push(child);
          children.sort((a, b) => sizes[b] - sizes[a] || a - b);
          for (let c = children.length - 1; c > 0; c--) {
            stack.push({ block: children[c], depth, up: row });
          }
          block = children[0] ?? -1;
        }
        row++;
      }
    }
    return { cells, rows, longest, count, trees };
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
    this.isOrderNew = this.isTreeNew = true;
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
    for (const name of ["counts", "known", "out", "parent", "idleSince", "level"]) made[name] = this[name].slice();
    made.holders = this.holders.map((list) => list && list.slice());
    made.tables = new Map([...this.tables].map(([seq, table]) => [seq, table.slice()]));
    for (const name of ["sampleOf", "waiting", "requests"]) made[name] = new Map(this[name]);
    made.dirty = new Set();
    made.isWhole = made.isOrderNew = made.isTreeNew = true;
    return made;
  }
}

const LEVELS = 12; // of the gradient
const SORTED = 20_000; // blocks that are sorted in a few milliseconds
const [SHARED, PENDING, CACHED, SWAPPED, FREE] = [1, 2, 3, 4, 5]; // names of requests are strings

// Which blocks have a cell of the map: all of them, or those in use. A block keeps its cell for as
// long as it is shown, so that what stays where it is can be followed by the eye.
class View {
  constructor() {
    this.mode = "all"; // or "used": held by requests; or "kept": those and the prefix cache's
    this.fill(new Pool());
  }

  shows(pool, block) {
    if (this.mode === "all") return true;
    if (pool.counts[block] > 0 || pool.holders[block] !== undefined) return true;
    return this.mode === "kept" && pool.stateOf(block) !== FREE;
  }

  // All cells anew, in the order of the blocks.
  fill(pool) {
    this.cells = []; // block of each cell; -1 of one that its block has left
    this.places = new Int32Array(pool.numBlocks).fill(-1); // cell of each block
    this.holes = [];
    for (let block = 0; block < pool.numBlocks; block++) if (this.shows(pool, block)) this.add(block);
  }

  add(block) {
    const cell = this.holes.length ? this.holes.pop() : this.cells.length;
    this.cells[cell] = block;
    this.places[block] = cell;
    return cell;
  }

  // Follows blocks that have changed; returns the cells to be drawn again.
  take(pool, blocks) {
    const changed = [];
    for (const block of blocks) {
      let cell = this.places[block];
      const isShown = this.shows(pool, block);
      if (isShown && cell < 0) cell = this.add(block);
      else if (!isShown && cell >= 0) {
        this.cells[cell] = this.places[block] = -1;
        this.holes.push(cell);
      }
      if (cell >= 0) changed.push(cell);
    }
    return changed;
  }
}

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
    // Those that came back from main memory, too; a window may have passed some.
    p.mark(e.blocks.slice(0, e.num_found).filter((block) => block >= 0), 1);
    p.follow(e.seq_id, 0, e.num_found);
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
    p.follow(e.seq_id, e.place, e.kept.length);
  },
  free: (p, e) => p.free(e.blocks),
  evict: (p, e) => p.mark([e.block], 0),
  forget: (p, e) => p.mark(e.blocks, 0),
  reset: (p) => {
    p.known.fill(0);
    p.isWhole = p.isOrderNew = p.isTreeNew = true;
  },
  schedule: (p, e) => {
    let prompt = 0;
    for (let i = 1; i < e.prompts.length; i += 2) prompt += e.prompts[i];
    p.step = { prompt, decode: e.num_tokens - prompt, sequences: e.num_sequences };
    p.largest = Math.max(p.largest, e.num_tokens);
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

// ---- tokens of an answer, and the text that they make

// A token may hold a part of a character, and text comes later than its tokens where it may yet be
// a stop string: a token is shown when the text that was told has it.
class Shown {
  constructor() {
    this.text = ""; // that was told
    this.length = 0; // of what is shown
    this.waiting = [];
    this.decoder = new TextDecoder();
  }

  // Takes the text and the tokens of one event; returns [text, token] of those to be shown now.
  take(text, tokens) {
    this.text += text;
    for (const token of tokens) {
      const piece = this.decoder.decode(bytesOf(token.text), { stream: true });
      this.waiting.push({ piece, token });
    }
    const found = [];
    while (this.waiting.length) {
      const { piece, token } = this.waiting[0];
      if (!this.text.startsWith(piece, this.length)) {
        if (this.text.length >= this.length + piece.length) this.waiting.shift(); // has no text
        else break;
      } else {
        this.waiting.shift();
        this.length += piece.length;
        if (piece) found.push([piece, token]);
      }
    }
    return found;
  }

  // The rest of the text, when the answer has ended: tokens that were cut by a stop string.
  rest() {
    const rest = this.text.slice(this.length);
    this.length = this.text.length;
    this.waiting = [];
    return rest;
  }
}

function bytesOf(text) {
  if (!text.startsWith("bytes:")) return new TextEncoder().encode(text);
  return Uint8Array.from(text.slice(6).split("\\x").slice(1), (hex) => parseInt(hex, 16));
}

if (typeof document === "undefined") { // a test without a browser
  module.exports = { Pool, View, Rates, messages, Shown, SHARED, PENDING, CACHED, SWAPPED, FREE };
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
const over = $("over");
const glass = over.getContext("2d"); // what happens just now, above the map
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
    [SWAPPED]: of("swapped"), [FREE]: of("free"), quiet: of("quiet"), bad: of("bad"), copy: of("copy"),
    levels: Array.from({ length: LEVELS }, (_, i) => mix(of("soon"), of("late"), i / (LEVELS - 1))),
  };
  pool.isTreeNew = true;
  ownColours.clear();
  pool.isWhole = true;
  isGlassClean = false;
}

function mix(from, to, share) {
  const part = (colour, i) => parseInt(colour.slice(1 + 2 * i, 3 + 2 * i), 16);
  const parts = [0, 1, 2].map((i) => Math.round(part(from, i) + share * (part(to, i) - part(from, i))));
  return `rgb(${parts.join(" ")})`;
}

const colourOfBlock = (block) => {
  const state = pool.stateOf(block);
  return state === CACHED ? colours.levels[pool.level[block]] : colourOf(state);
};

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

const view = new View();
const MANY = 4000; // blocks, from which on cells of all would be too small to be told apart
const LEAST = 64; // cells that there is room for, used or not
const [SMALLEST, LARGEST] = [3, 40]; // pixels of a cell
const TALLEST = 16_000; // pixels of a canvas that every browser makes
let isViewChosen = false;
let zoom = 1;
let filledAt = -1e9;

function layout(count) {
  const width = Math.max(60, $("frame").clientWidth);
  const room = width * Math.max(220, innerHeight * 0.5);
  const ratio = Math.min(2, devicePixelRatio || 1);
  const tallest = Math.sqrt(TALLEST / ratio * width / count);
  const fitting = Math.max(SMALLEST, Math.min(26, Math.floor(Math.sqrt(room / count))));
  const cell = Math.max(SMALLEST, Math.min(LARGEST, tallest, fitting * zoom));
  const columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.ceil(count / columns);
  grid = { cell, columns, rows, gap: cell >= 6 ? 1 : 0.5, ratio, count, blocks: pool.numBlocks };
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(rows * cell * ratio);
  canvas.style.height = rows * cell + "px";
  over.width = canvas.width;
  over.height = canvas.height;
  over.style.height = canvas.style.height;
  glass.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  isGlassClean = false;
  $("smaller").disabled = zoom <= 1;
  $("larger").disabled = cell < fitting * zoom || cell >= LARGEST;
}

const placeAt = (cell) => [(cell % grid.columns) * grid.cell, Math.floor(cell / grid.columns) * grid.cell];

// Where a block is on the map; null of one that has no cell.
function cellOf(block) {
  const cell = view.places[block] ?? -1;
  return cell < 0 ? null : placeAt(cell);
}

function draw(at) {
  if (dark.matches !== isDark) theme(); // asked here, when the styles are those of this frame
  // Cells that were left stay empty, until they are most of what one sees.
  const isSparse = view.holes.length > LEAST && view.holes.length > view.cells.length / 2;
  let isWhole = pool.isWhole, cells = null;
  if (isWhole || view.places.length !== pool.numBlocks || (isSparse && at - filledAt > 2000)) {
    view.fill(pool);
    filledAt = at;
    isWhole = true;
  } else cells = view.take(pool, pool.dirty);
  const count = view.cells.length;
  const isOff = view.mode === "all" ? grid.count !== Math.max(1, count)
    : grid.count < count || (grid.count > LEAST && grid.count > 4 * count);
  if (grid.blocks !== pool.numBlocks || isOff) {
    layout(view.mode === "all" ? Math.max(1, count) : Math.max(LEAST, Math.ceil(1.5 * count)));
    isWhole = true;
  }
  if (isWhole) {
    pen.fillStyle = colours.ground;
    pen.fillRect(0, 0, canvas.width, canvas.height);
    cells = view.cells.map((_, cell) => cell);
  }
  if (cells.length) {
    const byColour = new Map();
    for (const cell of cells) {
      const block = view.cells[cell];
      const colour = block < 0 ? colours.ground : colourOfBlock(block);
      const list = byColour.get(colour);
      if (list) list.push(cell);
      else byColour.set(colour, [cell]);
    }
    const size = grid.cell - grid.gap;
    for (const [colour, list] of byColour) {
      pen.fillStyle = colour;
      for (const cell of list) {
        const [x, y] = placeAt(cell);
        pen.fillRect(x, y, size, size);
      }
    }
    for (const cell of cells) {
      const holders = pool.holders[view.cells[cell]];
      if (holders && holders.length > 1) drawCount(cell, holders.length, size);
    }
  }
  pool.dirty.clear();
  pool.isWhole = false;
  $("none").hidden = view.cells.length > view.holes.length || !pool.numBlocks;
}

function drawCount(cell, count, size) {
  const [x, y] = placeAt(cell);
  const isShared = pool.stateOf(view.cells[cell]) === SHARED;
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

// Another choice of blocks, or another size of their cells.
function show(mode, size = zoom) {
  view.mode = $("view").value = mode;
  zoom = size;
  pool.isWhole = true;
  grid.blocks = -1;
}

$("view").addEventListener("change", () => {
  isViewChosen = true;
  show($("view").value, 1);
});
$("smaller").addEventListener("click", () => show(view.mode, Math.max(1, zoom / 1.5)));
$("larger").addEventListener("click", () => show(view.mode, zoom * 1.5));

// ---- what happens just now: copies as arrows, forks and evictions as frames

const SHOWN_MS = { copy: 1200, fork: 1200, evict: 500 };
const MOST_EFFECTS = 300;
const stays = matchMedia("(prefers-reduced-motion: reduce)");
let effects = [];
let isGlassClean = true;
const happened = []; // lines, the newest first

function tell(kind, text) {
  const last = happened[0];
  if (last && last.kind === kind && last.text === text) last.count++;
  else happened.unshift({ kind, text, count: 1 });
  happened.length = Math.min(happened.length, 3);
}

const sampleName = (seq) => {
  const sample = pool.sampleOf.get(seq);
  return sample ? `${short(sample.name)} sample ${sample.index}` : "a sequence";
};

// Looks at an event before the pool takes it.
function notice(e) {
  const until = performance.now();
  const add = (kind, blocks, from = -1) => {
    if (document.hidden || effects.length > MOST_EFFECTS) return;
    for (const block of blocks) effects.push({ kind, block, from, until: until + SHOWN_MS[kind] });
  };
  if (e.kind === "copy") {
    add("copy", [e.block], e.source);
    tell("copy", `${sampleName(e.seq_id)} writes: block ${e.source} is copied to ${e.block}`);
  } else if (e.kind === "fork") {
    const table = pool.tables.get(e.seq_id) ?? [];
    add("fork", table.slice(-64));
    tell("fork", `${sampleName(e.seq_id)} forks: sample ${e.index} shares its ${many(table.length, "block")}`);
  } else if (e.kind === "evict") {
    add("evict", [e.block]);
    tell("evict", "blocks of the prefix cache are given away");
  } else if (e.kind === "preempt") {
    tell("preempt", `${sampleName(e.seq_id)} loses its blocks`);
  } else if (e.kind === "swap_out" || e.kind === "swap_in") {
    const way = e.kind === "swap_out" ? "to" : "back from";
    tell(e.kind, `${many(e.blocks.length, "block")} ${way} main memory`);
  }
}

let framed = -1; // cell of the chosen block

function drawGlass(at) {
  const frame = view.places[chosen] ?? -1;
  if (!effects.length && isGlassClean && frame === framed) return;
  framed = frame;
  glass.clearRect(0, 0, over.width, over.height);
  effects = effects.filter((effect) => effect.until > at);
  isGlassClean = !effects.length;
  const size = grid.cell - grid.gap;
  for (const { kind, block, from, until } of effects) {
    const left = (until - at) / SHOWN_MS[kind];
    const place = cellOf(block);
    if (!place) continue;
    const [x, y] = place;
    glass.globalAlpha = stays.matches ? 0.9 : Math.min(1, 2 * left);
    glass.strokeStyle = kind === "evict" ? colours.bad : kind === "fork" ? colours.text : colours.copy;
    glass.lineWidth = 2;
    glass.strokeRect(x - 1, y - 1, size + 2, size + 2);
    const source = kind === "copy" && cellOf(from);
    if (!source) continue;
    const [fromX, fromY] = source.map((v) => v + size / 2);
    const along = stays.matches ? 1 : Math.min(1, 3 * (1 - left));
    const toX = fromX + along * (x + size / 2 - fromX), toY = fromY + along * (y + size / 2 - fromY);
    const angle = Math.atan2(toY - fromY, toX - fromX);
    glass.beginPath();
    glass.moveTo(fromX, fromY);
    glass.lineTo(toX, toY);
    for (const side of [2.6, -2.6]) {
      glass.moveTo(toX, toY);
      glass.lineTo(toX + 7 * Math.cos(angle + side), toY + 7 * Math.sin(angle + side));
    }
    glass.stroke();
  }
  glass.globalAlpha = 1;
  if (framed < 0) return;
  const [x, y] = placeAt(framed);
  for (const [colour, width] of [[colours.ground, 5], [colours.accent, 3]]) { // seen on any cell
    glass.strokeStyle = colour;
    glass.lineWidth = width;
    glass.strokeRect(x, y, size, size);
  }
}

// ---- prefix trees

const trees = $("trees");
const brush = trees.getContext("2d", { alpha: false });
const [TREE_STEP, TREE_CELL, MOST_ROWS, MOST_WIDE] = [13, 11, 240, 1200];
let grove = { cells: [] };
let treeAt = new Map(); // "row depth" -> block
let placeOf = new Map(); // block -> its cell
let treesDrawn = -1e9;

function drawTrees(at) {
  if (at - treesDrawn < (pool.numBlocks > SORTED ? 1000 : 400)) return;
  if (pool.isOrderNew) pool.grade();
  const isNew = pool.isTreeNew;
  if (!isNew && at - treesDrawn < 1000) return; // colours change more slowly
  treesDrawn = at;
  if (isNew) {
    grove = pool.grove(MOST_ROWS);
    treeAt = new Map();
    placeOf = new Map();
    for (const cell of grove.cells) {
      treeAt.set(cell.row + " " + cell.depth, cell.block);
      placeOf.set(cell.block, cell);
    }
    const ratio = Math.min(2, devicePixelRatio || 1);
    const width = Math.max(1, Math.min(grove.longest, MOST_WIDE)) * TREE_STEP + 8;
    const height = Math.max(1, Math.min(grove.rows, MOST_ROWS)) * TREE_STEP + 8;
    trees.width = width * ratio;
    trees.height = height * ratio;
    trees.style.width = width + "px";
    trees.style.height = height + "px";
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    const hidden = grove.rows > MOST_ROWS ? `; ${grove.rows - MOST_ROWS} branches are not shown` : "";
    $("trees-told").textContent = grove.count
      ? `${many(grove.trees, "tree")}, ${many(grove.count, "block")}, the longest ${grove.longest}${hidden}`
      : "nothing is cached yet";
  }
  brush.fillStyle = colours.ground;
  brush.fillRect(0, 0, trees.width, trees.height);
  brush.strokeStyle = colours.quiet;
  brush.lineWidth = 1;
  brush.beginPath();
  for (const { depth, row, up } of grove.cells) {
    if (up < 0) continue;
    const x = (depth - 1) * TREE_STEP + 4 + TREE_CELL / 2;
    brush.moveTo(x, up * TREE_STEP + 4 + TREE_CELL);
    brush.lineTo(x, row * TREE_STEP + 4 + TREE_CELL / 2);
    brush.lineTo(depth * TREE_STEP + 4, row * TREE_STEP + 4 + TREE_CELL / 2);
  }
  brush.stroke();
  for (const { block, depth, row } of grove.cells) {
    if (depth >= MOST_WIDE) continue;
    const x = depth * TREE_STEP + 4, y = row * TREE_STEP + 4;
    brush.fillStyle = colourOfBlock(block);
    brush.fillRect(x, y, TREE_CELL, TREE_CELL);
    if (block === chosen) {
      brush.strokeStyle = colours.accent;
      brush.lineWidth = 2;
      brush.strokeRect(x, y, TREE_CELL, TREE_CELL);
    }
  }
}

const drawTreesSoon = () => { treesDrawn = -1e9; };

trees.addEventListener("click", (event) => {
  const box = trees.getBoundingClientRect();
  const place = (from) => Math.floor((from - 4) / TREE_STEP);
  const block = treeAt.get(place(event.clientY - box.top) + " " + place(event.clientX - box.left));
  if (block !== undefined) choose(block);
});
trees.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step || !grove.cells.length) return;
  event.preventDefault();
  const from = placeOf.get(chosen);
  if (!from) return choose(grove.cells[0].block);
  const [rows, columns] = step;
  let block = treeAt.get(from.row + rows + " " + (from.depth + columns));
  if (rows && block === undefined) { // the nearest cell of that row, at its end or its beginning
    const row = grove.cells.filter((cell) => cell.row === from.row + rows);
    const far = (cell) => Math.abs(cell.depth - from.depth);
    block = row.sort((a, b) => far(a) - far(b))[0]?.block;
  } else if (columns < 0 && block === undefined) block = pool.parent[chosen]; // where it branches
  if (block === undefined || block < 0) return;
  choose(block);
  const cell = placeOf.get(block);
  if (!cell) return;
  const grown = $("grove");
  const into = (at, size) => Math.max(0, at - size / 2);
  if (cell.row * TREE_STEP < grown.scrollTop || (cell.row + 2) * TREE_STEP > grown.scrollTop + grown.clientHeight) {
    grown.scrollTop = into(cell.row * TREE_STEP, grown.clientHeight);
  }
  if (cell.depth * TREE_STEP < grown.scrollLeft || (cell.depth + 2) * TREE_STEP > grown.scrollLeft + grown.clientWidth) {
    grown.scrollLeft = into(cell.depth * TREE_STEP, grown.clientWidth);
  }
});

function choose(block) {
  if (!pool.numBlocks) return;
  chosen = Math.max(0, Math.min(pool.numBlocks - 1, block));
  chosenRequest = null;
  drawTreesSoon();
  detail();
  readTokens();
}

canvas.addEventListener("click", (event) => {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / grid.cell);
  const row = Math.floor((event.clientY - box.top) / grid.cell);
  const block = column < grid.columns ? view.cells[row * grid.columns + column] ?? -1 : -1;
  if (block >= 0) choose(block);
});
canvas.addEventListener("keydown", (event) => {
  const step = {
    ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns,
    PageUp: -10 * grid.columns, PageDown: 10 * grid.columns,
    Home: -Infinity, End: Infinity,
  }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  // From a block that has no cell, the first key leads to the first that has one.
  const from = view.places[chosen] ?? -1, last = view.cells.length - 1;
  let cell = from < 0 ? 0 : Math.max(0, Math.min(last, from + step));
  const way = from < 0 || step === -Infinity || (step > 0 && step < Infinity) ? 1 : -1;
  while (view.cells[cell] < 0) cell += way; // over cells that were left
  if (view.cells[cell] === undefined) return;
  choose(view.cells[cell]);
  const frame = $("frame"), [, y] = placeAt(cell);
  if (y < frame.scrollTop || y + grid.cell > frame.scrollTop + frame.clientHeight) {
    frame.scrollTop = y - frame.clientHeight / 2;
  }
});

const MARKS = {
  [PENDING]: "held by a step that is unfinished",
  [CACHED]: "free; the prefix cache finds it",
  [SWAPPED]: "free; what it held lies in main memory",
  [FREE]: "free",
};
let detailText = "";
const many = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;

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
    if (state === CACHED) {
      const [place, count] = pool.evictionPlace(chosen);
      title += `; number ${place} of ${count} to be evicted`;
    }
    if (pool.known[chosen]) {
      const path = [];
      for (let b = pool.parent[chosen]; b >= 0 && path.length < 1e5; b = pool.parent[b]) path.push(b);
      if (path.length) lines.push(`follows ${many(path.length, "block")} of its prefix, the last ${path[0]}`);
    }
    if (tokensOf.block === chosen && tokensOf.text !== null && holders.length) {
      lines.push({ label: "its tokens: ", code: tokensOf.text });
    }
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
  const text = [title, ...lines.map((line) => line.code ?? line)].join("\n");
  if (text === detailText) return; // else a screen reader says it again and again
  detailText = text;
  const list = make("ul");
  for (const line of lines) {
    const item = make("li", line.label ?? line);
    if (line.code !== undefined) item.append(make("code", line.code));
    list.append(item);
  }
  box.replaceChildren(make("strong", title), list);
}

// The tokens of the chosen block, where the server tells them.
let tokensOf = { block: -1, text: null };

async function readTokens() {
  const block = chosen, seq = (pool.holders[block] ?? [])[0];
  const sample = pool.sampleOf.get(seq);
  if (film || !sample) return;
  const first = (pool.tables.get(seq) ?? []).indexOf(block) * pool.blockSize;
  const query = `&sample=${sample.index}&first=${first}&last=${first + pool.blockSize}`;
  const prompts = await explained([sample.name], query).catch(() => null);
  const one = prompts?.find((p) => p.request_id === sample.name);
  if (block !== chosen) return;
  if (one?.tokens?.length) {
    const decoder = new TextDecoder();
    const parts = one.tokens.map((token) => decoder.decode(bytesOf(token), { stream: true }));
    tokensOf = { block, text: JSON.stringify(parts.join("")) };
  } else tokensOf = { block, text: one && one.tokens === null ? "not told" : null };
  detail();
}

// What the server says of requests that are still there; of several prompts they are one job, whose
// parts end in ~1 ... Asked at once: of one that has ended a question of its own would be an error.
const MOST_ASKED = 64;
async function explained(names, more = "") {
  const jobs = new Set(names.flatMap((name) => [name, name.replace(/~\d+$/, "")]));
  const query = [...jobs].slice(0, MOST_ASKED).map((name) => "request_id=" + encodeURIComponent(name));
  if (!query.length) return [];
  const answer = await ask("/v1/explain?" + query.join("&") + more);
  return answer.ok ? (await answer.json()).data : [];
}

function about(name) {
  const request = pool.requests.get(name);
  if (!request) return "not in the engine any more";
  const known = told.get(name);
  const parts = [];
  if (request.numTokens !== null) parts.push(`${request.numTokens} prompt tokens`);
  if (known?.num_generated_tokens !== undefined) {
    parts.push(`${known.num_generated_tokens} generated`, `${known.num_cached_tokens} cached`);
    if (known.num_preemptions) {
      const count = known.num_preemptions;
      parts.push(`${count} preemption${count === 1 ? "" : "s"}`);
    }
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
  const { step, budget, largest } = pool;
  if (step) {
    const of = budget ? ` of ${budget.toLocaleString("en")}` : `, the largest had ${largest}`;
    $("step-told").textContent = `last step: ${step.prompt} prompt + ${step.decode} decode tokens${of}`;
    const whole = Math.max(1, budget || largest, step.prompt + step.decode);
    $("step-prompt").style.width = 100 * step.prompt / whole + "%";
    $("step-decode").style.width = 100 * step.decode / whole + "%";
  }
  const lines = happened.map(({ kind, text, count }) => {
    const item = make("li");
    item.append(make("b", KINDS[kind]), ` ${text}${count > 1 ? ` (${count} times)` : ""}`);
    return item;
  });
  $("happened").replaceChildren(...lines);
  canvas.setAttribute("aria-label", "Map of the cache blocks: " + $("usage").textContent);
}

const KINDS = {
  copy: "Copy", fork: "Fork", evict: "Eviction", preempt: "Preemption", swap_out: "Swap", swap_in: "Swap",
};
const MOST_LISTED = 1000;

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
  fill($("waiting"), ordered(waiting), (name, samples) => {
    const request = pool.request(name);
    const known = told.get(name);
    if (running.has(name)) return `${many(samples, "sample")} of it ${samples > 1 ? "wait" : "waits"}, others run`;
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
  const more = entries.length === undefined ? entries.size : entries.length;
  if (more > shown.length) list.append(make("li", `and ${(more - shown.length).toLocaleString("en")} more`));
}

// Who waits, the next one first: events say who does, the order is the policy's and changes.
let inLine = [];
async function readLine() {
  const answer = await ask(`/v1/queue?limit=${MOST_LISTED}`);
  if (answer.ok) inLine = (await answer.json()).data;
}

// [name, samples] of those who wait, in their order; in a film, of which no policy is known, that of
// their arrival, as who was preempted keeps its place.
function ordered(waiting) {
  const place = film ? new Map() : new Map(inLine.map((name, i) => [name, i]));
  const key = (name) => place.get(name) ?? Infinity;
  return [...waiting].sort(([a], [b]) =>
    key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : pool.request(a).number - pool.request(b).number);
}

// Asks for those that can be seen, a few at a time.
async function explainSome() {
  const names = new Set();
  if (chosenRequest) names.add(chosenRequest);
  for (const seq of (pool.holders[chosen] ?? []).slice(0, 4)) names.add(pool.sampleOf.get(seq)?.name);
  for (const id of ["waiting", "running"]) {
    for (const item of [...$(id).children].slice(0, 14)) names.add(item.dataset.name);
  }
  if (document.hidden) return;
  for (const one of await explained([...names].filter(Boolean))) told.set(one.request_id, one);
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

// What serves, told in the head.
let server = null; // and when it began, by the clock of this page
async function readServer() {
  const answer = await ask("/v1/server");
  if (!answer.ok) return;
  const told = await answer.json();
  server = { ...told, begun: performance.now() - 1000 * told.uptime_s };
  document.title = `${told.model} · tilewise`;
}

function head() {
  if (!server) return;
  const up = Math.floor((performance.now() - server.begun) / 1000);
  const [d, h, m] = [Math.floor(up / 86400), Math.floor(up / 3600) % 24, Math.floor(up / 60) % 60];
  const age = d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min` : `${up} s`;
  const parts = [["model", server.model], ["version", server.version],
    ["on", server.devices], ["up", age]].filter(([, value]) => value);
  const text = parts.map((part) => part.join(" ")).join("  ·  ");
  if ($("about").textContent !== text) $("about").textContent = text;
}

async function everySecond() {
  for (let turn = 0; ; turn++) {
    try {
      if (!server) await readServer();
      head();
      if (!document.hidden) {
        if (!film && isFollowing) await Promise.all([explainSome(), pool.waiting.size ? readLine() : null]);
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
    server = null; // another one may come
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
    if (!isViewChosen && !film) show(data.num_blocks > MANY ? "used" : "all");
    clock = { time: data.time, at: performance.now() };
    tiles();
    lists();
    readPast(data.next).catch(() => {}); // the rates then begin with now
    return;
  }
  for (const event of data) {
    if (!film) notice(event);
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
  happened.length = 0;
  chosen = -1;
  chosenRequest = null;
  $("detail").textContent = detailText = "Choose a block to see whose it is.";
  $("film").hidden = false;
  if (!isViewChosen) show("all");
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
  while (place < film.events.length && film.events[place].time <= film.playTime) {
    notice(film.events[place++]);
  }
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
  pool.isWhole = pool.isTreeNew = true;
  happened.length = 0;
  if (!isViewChosen) show(pool.numBlocks > MANY ? "used" : "all");
  $("film").hidden = true;
  say(isFollowing ? "live" : "connecting");
});

// ---- playground

let running = null;
const isChat = () => $("as-chat").checked;
const talk = []; // messages of the chat
const MOST = { text: 96, chat: 512 }; // tokens, where nobody has said another number

function playAs() {
  const chats = isChat();
  for (const id of ["n-of", "probabilities-of", "samples"]) $(id).hidden = chats;
  $("talk").hidden = $("anew").hidden = !chats;
  $("prompt-label").textContent = chats ? "Your message (Enter sends it, Shift and Enter begin a line)" : "Prompt";
  $("send").textContent = chats ? "Send" : "Generate";
  if (Number($("max").value) === MOST[chats ? "text" : "chat"]) $("max").value = MOST[chats ? "chat" : "text"];
  if (chats && !talk.length) $("prompt").value = "";
}
$("as-chat").addEventListener("change", playAs);
$("as-text").addEventListener("change", playAs);
$("anew").addEventListener("click", () => {
  talk.length = 0;
  $("talk").replaceChildren();
  $("play-told").textContent = "";
  $("prompt").focus();
});
$("prompt").addEventListener("keydown", (event) => {
  if (!isChat() || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});

function saying(role, text) {
  const box = make("div");
  box.className = "said " + role;
  box.append(make("small", role === "user" ? "you" : server?.model ?? "model"), make("span", text));
  $("talk").append(box);
  $("talk").scrollTop = $("talk").scrollHeight;
  return box;
}

async function chat() {
  const text = $("prompt").value.trim();
  if (!text) return;
  const said = [...talk, { role: "user", content: text }];
  const mine = saying("user", text), box = saying("assistant", "");
  const [label, words] = box.children;
  const begun = performance.now();
  let first = null, tokens = 0, whole = "", thought = null;
  $("prompt").value = "";
  try {
    const answer = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal: running.signal,
      body: JSON.stringify({
        messages: said, max_tokens: Number($("max").value), stream: true,
        temperature: Number($("temperature").value), stream_options: { include_usage: true },
      }),
    });
    if (!answer.ok) throw new Error(await problem(answer));
    for await (const { data } of messages(answer.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const { delta, finish_reason: reason } of chunk.choices) {
        const thinks = delta.reasoning_content ?? delta.reasoning ?? "";
        if (thinks || delta.content) first ??= performance.now() - begun;
        if (thinks) {
          if (!thought) {
            thought = make("span");
            thought.className = "thought";
            words.before(thought);
          }
          thought.append(thinks);
        }
        whole += delta.content ?? "";
        words.append(delta.content ?? "");
        if (reason) label.textContent += reason === "length" ? " · cut at its most tokens" : "";
      }
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      $("talk").scrollTop = $("talk").scrollHeight;
    }
    $("play-told").textContent = `${tokens} tokens in ${seconds((performance.now() - begun) / 1000)}, ` +
      `first after ${seconds((first ?? 0) / 1000)}`;
  } catch (error) {
    const isStopped = error.name === "AbortError";
    $("play-told").textContent = isStopped ? "stopped" : error.message;
    if (!whole) { // nothing was said: the message can be sent once more
      mine.remove();
      box.remove();
      $("prompt").value = text;
      return;
    }
    label.textContent += isStopped ? " · stopped" : " · cut by an error";
  }
  talk.push({ role: "user", content: text }, { role: "assistant", content: whole });
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  if (isChat()) {
    running = new AbortController();
    $("send").disabled = true;
    $("stop").disabled = false;
    await chat();
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    return;
  }
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
  const shown = boxes.map(() => new Shown());
  const wants = $("probabilities").checked;
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
        stream_options: { include_usage: true }, ...(wants ? { logprobs: 5 } : {}),
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
        if (choice.logprobs) {
          const { tokens: texts, token_logprobs: own, top_logprobs: top } = choice.logprobs;
          const told = texts.map((one, i) => ({ text: one, own: own[i], top: top?.[i] ?? {} }));
          for (const [piece, token] of shown[choice.index].take(choice.text, told)) {
            text.append(tokenOf(piece, token));
          }
          if (choice.finish_reason) text.append(shown[choice.index].rest());
        } else text.append(choice.text);
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

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 10 ? share.toFixed(0) + " %" : share >= 0.1 ? share.toFixed(1) + " %" : "< 0.1 %";
};

const asTold = new WeakMap(); // element -> its token

function tokenOf(piece, token) {
  const span = make("span", piece);
  span.className = "token";
  span.tabIndex = 0;
  // The less likely it was, the stronger its ground.
  const doubt = Math.min(0.55, 0.09 * -token.own);
  if (doubt > 0.02) span.style.background = `rgb(214 120 40 / ${doubt.toFixed(2)})`;
  span.setAttribute("aria-label", `${piece}, ${percent(token.own)}`);
  asTold.set(span, token);
  return span;
}

function hint(span) {
  const token = span && asTold.get(span);
  $("hint").hidden = !token;
  if (!token) return;
  const table = make("table");
  const seen = new Set();
  const add = (text, logprob, isOwn) => {
    if (seen.has(text)) return;
    seen.add(text);
    const row = make("tr"), first = make("td"), name = make("code", JSON.stringify(text));
    first.append(name);
    if (isOwn) name.style.fontWeight = 700;
    row.append(first, make("td", percent(logprob)));
    table.append(row);
  };
  const all = Object.entries(token.top).map(([text, logprob]) => [text, logprob, text === token.text]);
  if (!(token.text in token.top)) all.push([token.text, token.own, true]);
  for (const one of all.sort((a, b) => b[1] - a[1])) add(...one);
  $("hint").replaceChildren(table);
  const box = span.getClientRects()[0], size = $("hint").getBoundingClientRect();
  const below = box.bottom + 6 + size.height < innerHeight;
  $("hint").style.left = Math.max(4, Math.min(box.left, innerWidth - size.width - 4)) + "px";
  $("hint").style.top = (below ? box.bottom + 6 : box.top - size.height - 6) + "px";
}

for (const [kind, of] of [["pointerover", (e) => e.target], ["focusin", (e) => e.target],
  ["pointerleave", () => null], ["focusout", () => null]]) {
  $("samples").addEventListener(kind, (event) => hint(of(event)?.closest?.(".token")));
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hint(null);
});
addEventListener("scroll", () => hint(null), { passive: true });

// ---- begin

if (sessionStorage.getItem(KEY)) $("leave").hidden = false;
playAs(); // a browser keeps what was chosen before it loads the page anew
$("leave").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
new ResizeObserver(() => { grid.blocks = -1; pool.isWhole = true; }).observe($("frame"));
theme();
function frame(at) {
  if (film?.isPlaying) advance(at);
  drawTrees(at);
  draw(at);
  drawGlass(at);
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
follow();
everySecond();
})();
