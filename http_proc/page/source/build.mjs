// Build the bundle of the page: `npm ci --ignore-scripts && npm run build`; `npm run check` compares.
//
// The same sources and the same lock file make the same bytes on every machine.

import { createHash } from "node:crypto";
import { mkdtemp, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const SOURCE = dirname(fileURLToPath(import.meta.url));
const BUNDLE = join(SOURCE, "..", "bundle");
const COPIED = ["index.html", "icon.svg"];
const MAX_BYTES = 300_000;

/** Return the paths of all source files, relative and sorted by their bytes. */
async function sourceFiles() {
  const entries = await readdir(SOURCE, { recursive: true, withFileTypes: true });
  return entries
    .filter((entry) => entry.isFile())
    .map((entry) => relative(SOURCE, join(entry.parentPath, entry.name)).split(sep).join("/"))
    .filter((path) => !path.startsWith("node_modules/"))
    .sort((a, b) => (a < b ? -1 : 1));
}

/** Return the hash of all sources; tests/unit/http/page/test_bundle.py computes the same. */
async function sourceHash() {
  const hash = createHash("sha256");
  for (const path of await sourceFiles()) {
    hash.update(`${path}\0`).update(await readFile(join(SOURCE, path))).update("\0");
  }
  return hash.digest("hex");
}

/** Return the licences of the packages that the bundle has code of. */
async function licences(inputs) {
  const names = Object.keys(inputs)
    .map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1])
    .filter(Boolean);
  const texts = [];
  for (const name of [...new Set(names)].sort()) {
    const folder = join(SOURCE, "node_modules", name);
    const about = JSON.parse(await readFile(join(folder, "package.json"), "utf-8"));
    const file = (await readdir(folder)).find((entry) => /^licen[cs]e/i.test(entry));
    const text = file ? await readFile(join(folder, file), "utf-8") : "";
    texts.push(`${name} ${about.version} (${about.license})\n\n${text.trim()}\n`);
  }
  return `The page contains code of these packages.\n\n${texts.join(`\n${"-".repeat(80)}\n\n`)}`;
}

async function buildInto(folder) {
  await mkdir(folder, { recursive: true });
  const { metafile } = await build({
    absWorkingDir: SOURCE,
    entryPoints: ["app.jsx"],
    outdir: folder,
    bundle: true,
    minify: true,
    format: "iife",
    target: ["chrome123", "firefox120", "safari17.5"],
    jsx: "automatic",
    jsxImportSource: "preact",
    legalComments: "none",
    charset: "utf8",
    metafile: true,
  });
  for (const name of COPIED) {
    await writeFile(join(folder, name), await readFile(join(SOURCE, name)));
  }
  await writeFile(join(folder, "licences.txt"), await licences(metafile.inputs));
  const files = {};
  for (const name of (await readdir(folder)).filter((name) => name !== "manifest.json").sort()) {
    const body = await readFile(join(folder, name));
    files[name] = createHash("sha256").update(body).digest("hex");
  }
  const manifest = { sources: await sourceHash(), files };
  await writeFile(join(folder, "manifest.json"), `${JSON.stringify(manifest, null, 2)}\n`);
  return Object.keys(files);
}

/** Print the size of each file, and fail above the limit of all together. */
async function report(folder, names) {
  let total = 0;
  for (const name of names) {
    const body = await readFile(join(folder, name));
    if (name !== "licences.txt") total += body.length; // no page loads it
    console.log(`${name.padEnd(14)} ${body.length} bytes, ${gzipSync(body).length} compressed`);
  }
  if (total > MAX_BYTES) throw new Error(`a page loads ${total} bytes, the limit is ${MAX_BYTES}`);
  console.log(`loaded         ${total} bytes of at most ${MAX_BYTES}`);
}

async function check() {
  const folder = await mkdtemp(join(tmpdir(), "page-"));
  try {
    for (const name of [...(await buildInto(folder)), "manifest.json"]) {
      const [built, kept] = [join(folder, name), join(BUNDLE, name)];
      const current = (await readFile(built)).equals(await readFile(kept).catch(() => Buffer.of()));
      if (!current) throw new Error(`bundle/${name} is not made of these sources: npm run build`);
    }
    console.log("the bundle is made of these sources");
  } finally {
    await rm(folder, { recursive: true });
  }
}

if (process.argv.includes("--check")) await check();
else {
  await rm(BUNDLE, { recursive: true, force: true });
  await report(BUNDLE, await buildInto(BUNDLE));
}
