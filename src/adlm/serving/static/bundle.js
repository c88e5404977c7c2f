// Modules as one script, for a file that opens without a server. It understands what the page's modules are written in:
// named imports from a neighbour, and `export` in front of a declaration.

const IMPORT = /^import \{([^}]*)\} from "\.\/([\w.]+)";\n/gm;
const EXPORT = /^export (async function\*?|function|const|class) (\w+)/gm;

/** One script that runs `entry`: every module is a function that returns what it exports. `read(name)`: its source. */
export async function bundle(entry, read) {
  const parts = [], known = new Set();

  async function add(name) {
    if (known.has(name)) return;
    known.add(name);
    const source = await read(name);
    for (const [, , other] of source.matchAll(IMPORT)) await add(other);
    const names = [...source.matchAll(EXPORT)].map(([, , exported]) => exported);
    const body = source
      .replace(IMPORT, (_, imported, other) => `const {${imported}} = modules["${other}"];\n`)
      .replace(EXPORT, "$1 $2");
    parts.push(`modules["${name}"] = (() => {\n${body}\nreturn { ${names.join(", ")} };\n})();`);
  }

  await add(entry);
  return `const modules = {};\n${parts.join("\n")}`;
}
