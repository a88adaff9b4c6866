// A client in Node.js without packages, as a model for languages that have no ZeroMQ library: it
// speaks ZMTP over a TCP socket and packs msgpack by hand.
//
// node examples/raw_client.mjs [HOST:PORT]

import { randomBytes } from "node:crypto";
import { connect } from "node:net";

const [host, port] = (process.argv[2] ?? "127.0.0.1:5555").replace("tcp://", "").split(":");

// msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md), without extension types.
function pack(value) {
  if (value === null) return Buffer.from([0xc0]);
  if (typeof value === "boolean") return Buffer.from([value ? 0xc3 : 0xc2]);
  if (Number.isInteger(value) && value >= 0 && value < 128) return Buffer.from([value]);
  if (Number.isInteger(value)) return bytes(0xd3, 8, (b) => b.writeBigInt64BE(BigInt(value), 1));
  if (typeof value === "number") return bytes(0xcb, 8, (b) => b.writeDoubleBE(value, 1));
  if (typeof value === "string") {
    const text = Buffer.from(value);
    return Buffer.concat([bytes(0xdb, 4, (b) => b.writeUInt32BE(text.length, 1)), text]);
  }
  const isArray = Array.isArray(value);
  const items = isArray ? value : Object.entries(value).flat();
  const count = isArray ? items.length : items.length / 2;
  const head = bytes(isArray ? 0xdd : 0xdf, 4, (b) => b.writeUInt32BE(count, 1));
  return Buffer.concat([head, ...items.map(pack)]);
}

// Return a byte `type` and `size` bytes behind it, which `write` fills.
function bytes(type, size, write) {
  const buffer = Buffer.alloc(1 + size, type);
  write(buffer);
  return buffer;
}

// Return the value at data[at.i], and move at.i behind it.
function unpack(data, at = { i: 0 }) {
  const uint = (size) => data.readUIntBE((at.i += size) - size, size);
  const int = (size) => data.readIntBE((at.i += size) - size, size);
  const slice = (size) => data.subarray((at.i += size) - size, at.i);
  const array = (count) => Array.from({ length: count }, () => unpack(data, at));
  const entry = () => [unpack(data, at), unpack(data, at)];
  const map = (count) => Object.fromEntries(Array.from({ length: count }, entry));
  const type = uint(1);
  if (type < 0x80) return type;
  if (type < 0x90) return map(type & 0x0f);
  if (type < 0xa0) return array(type & 0x0f);
  if (type < 0xc0) return slice(type & 0x1f).toString();
  if (type >= 0xe0) return type - 0x100;
  if (type === 0xc0) return null;
  if (type <= 0xc3) return type === 0xc3;
  if (type <= 0xc6) return slice(uint(1 << (type - 0xc4))); // bin
  if (type === 0xca) return slice(4).readFloatBE();
  if (type === 0xcb) return slice(8).readDoubleBE();
  if (type === 0xcf) return Number(slice(8).readBigUInt64BE());
  if (type === 0xd3) return Number(slice(8).readBigInt64BE());
  if (type >= 0xcc && type <= 0xce) return uint(1 << (type - 0xcc));
  if (type >= 0xd0 && type <= 0xd2) return int(1 << (type - 0xd0));
  if (type >= 0xd9 && type <= 0xdb) return slice(uint(1 << (type - 0xd9))).toString();
  if (type === 0xdc || type === 0xdd) return array(uint(type === 0xdc ? 2 : 4));
  if (type === 0xde || type === 0xdf) return map(uint(type === 0xde ? 2 : 4));
  throw new Error(`msgpack type 0x${type.toString(16)}`);
}

// ZMTP 3.0 (https://rfc.zeromq.org/spec/23): a greeting of 64 bytes, a READY command, then messages
// of one frame. libzmq closes a connection that sends a message before it has sent its own READY.
const LONG = 2;
const COMMAND = 4;

function frame(body, flags = 0) {
  if (body.length < 256) return Buffer.concat([Buffer.from([flags, body.length]), body]);
  const head = bytes(flags | LONG, 8, (b) => b.writeBigUInt64BE(BigInt(body.length), 1));
  return Buffer.concat([head, body]);
}

function property(name, value) {
  const size = Buffer.from([0, 0, 0, value.length]);
  return Buffer.concat([Buffer.from([name.length]), Buffer.from(name), size, value]);
}

const greeting = Buffer.alloc(64);
greeting.set([0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0]);
greeting.write("NULL", 12);
const ready = Buffer.concat([
  Buffer.from("\x05READY"),
  property("Socket-Type", Buffer.from("DEALER")),
  property("Identity", randomBytes(16)), // the routing id
]);
const prompt = [{ role: "user", content: "Name the capital of France." }];
const params = { max_new_tokens: 32, temperature: 0 };
const request = ["generate", 1, randomBytes(16).toString("hex"), prompt, params];

const socket = connect(Number(port), host);
socket.write(Buffer.concat([greeting, frame(ready, COMMAND)]));
socket.setTimeout(30_000, () => fail(`no answer from ${host}:${port} within 30 s`));
socket.on("error", (error) => fail(error.message));
socket.on("close", () => fail("the server closed the connection"));

let received = Buffer.alloc(0);
let greeted = false;
socket.on("data", (data) => {
  received = Buffer.concat([received, data]);
  if (!greeted && received.length >= 64) {
    received = received.subarray(64);
    greeted = true;
  }
  while (greeted && received.length >= 2) {
    const [flags] = received;
    const start = flags & LONG ? 9 : 2;
    if (received.length < start) return;
    const end = start + (flags & LONG ? Number(received.readBigUInt64BE(1)) : received[1]);
    if (received.length < end) return;
    const body = received.subarray(start, end);
    received = received.subarray(end);
    if (!(flags & COMMAND)) onMessage(unpack(body));
    else if (body.toString("latin1", 1, 6) === "READY") socket.write(frame(pack(request)));
  }
});

function onMessage([tag, ...fields]) {
  if (tag === "refused" || tag === "server_gone") fail(`error: ${fields.at(-1)}`);
  if (tag !== "chunks") return;
  for (const [, , text, , , end] of fields[0]) {
    process.stdout.write(text);
    if (end === null) continue;
    const [finishReason, usage] = end;
    process.stdout.write(`\n[${finishReason}, ${usage[1]} tokens]\n`, () => process.exit(0));
  }
}

function fail(reason) {
  console.error(reason);
  process.exit(1);
}
