/** Colours for code, in the languages that answers have most. */

import core from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";

const MAX_LENGTH = 40_000;
const LANGUAGES = { bash, cpp, diff, go, java, json, python, rust, sql, typescript, xml, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) core.registerLanguage(name, language);
core.registerAliases(["c", "h", "cc"], { languageName: "cpp" });
// TypeScript's grammar has that of JavaScript in it.
core.registerAliases(["javascript", "js", "jsx", "mjs", "cjs"], { languageName: "typescript" });
core.registerAliases(["console", "shell"], { languageName: "bash" });

/** Return HTML for a piece of code; null: not in this language, or too long. */
export function highlight(text, language) {
  if (text.length > MAX_LENGTH || !core.getLanguage(language)) return null;
  return core.highlight(text, { language, ignoreIllegals: true }).value;
}
