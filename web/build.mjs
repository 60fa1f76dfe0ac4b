// Bundles src/ into one script and one style sheet, with the licences of what is inside at the script's end.
import { build } from "esbuild";
import { existsSync, mkdirSync, readFileSync, readdirSync, renameSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "../src/dovetail/view/page/bundle");

const result = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  bundle: true,
  minify: true,
  write: false,
  metafile: true,
  outdir: "bundle",
  format: "iife",
  target: ["chrome109", "firefox115", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
});

/** The licence texts of the packages that ended up in the bundle. */
function licences() {
  const used = new Set();
  for (const file of Object.keys(result.metafile.inputs)) {
    const found = file.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//);
    if (found) used.add(found[1]);
  }
  return [...used].sort().map((name) => {
    const folder = join(here, "node_modules", name);
    const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const file = readdirSync(folder).find((f) => /^licen[cs]e/i.test(f));
    if (!file) throw new Error(`${name}: no licence file`);
    const text = readFileSync(join(folder, file), "utf8").trim().replaceAll("*/", "* /").replaceAll("</", "<\\/");
    return `${name} ${version}\n\n${text}`;
  });
}

if (!existsSync(out)) mkdirSync(out, { recursive: true });
for (const file of result.outputFiles) {
  const name = file.path.endsWith(".css") ? "app.css" : "app.js";
  // The script stands inside an HTML page: what would end its element must not occur in it.
  let text = file.text.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--").trimEnd();
  if (name === "app.js") text += `\n/*\nContains:\n\n${licences().join("\n\n")}\n*/`;
  // Renamed into place: a page that is being served never sees half a file.
  writeFileSync(join(out, `.${name}`), `${text}\n`);
  renameSync(join(out, `.${name}`), join(out, name));
  console.log(`${name}: ${(text.length / 1024).toFixed(0)} KiB`);
}
