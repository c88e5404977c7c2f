// The present settings as a program. Every snippet prints the text that the page shows for them.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`; // for a shell

/** JSON as Python writes it. */
function python(value) {
  return JSON.stringify(value, null, 4)
    .replace(/("(?:[^"\\]|\\.)*")|\bnull\b|\btrue\b|\bfalse\b/g, (word, text) =>
      text ?? { null: "None", true: "True", false: "False" }[word]);
}

/** name -> code. `body`: a request of the page; `locked`: the server asks for a key. */
export function snippets({ anchors: _, ...body }, origin, locked) {
  const url = `${origin}/v1/infill`;
  const key = locked ? ` \\\n  -H "Authorization: Bearer $ADLM_API_KEY"` : "";
  return {
    curl: `curl -s ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}`,
    Python: `import json
import os
import urllib.request

body = ${python(body)}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("ADLM_API_KEY", "")}
request = urllib.request.Request("${url}", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["text"])`,
    JavaScript: `const body = ${JSON.stringify(body, null, 2)};
const answer = await fetch("${url}", {
  method: "POST",
  headers: { "Content-Type": "application/json"${locked ? ', Authorization: "Bearer YOUR_KEY"' : ""} },
  body: JSON.stringify(body),
});
console.log((await answer.json()).choices[0].text);`,
  };
}
