// Hands the filled-in sheet back as a CSV file; `rows`, `fields` and `asked` are set before.
document.getElementById("done").onclick = () => {
  const name = document.getElementById("annotator").value.trim();
  const answers = new FormData(document.querySelector("form"));
  const open = rows.filter(r => asked.some(q => !answers.get(q + "-" + r.item)));
  if (!name || open.length) {
    alert(name ? "Not answered: " + open.map(r => r.item).join(", ") : "Your name, please");
    return;
  }
  // No cell is a formula, as in sheet.csv.
  const plain = text => /^\s*[=+@＝＋－＠\t\r\n-]/.test(text) ? "'" + text : text;
  const cell = text => '"' + plain(text).replaceAll('"', '""') + '"';
  const filled = rows.map(r => ({...r, annotator: name,
    ...Object.fromEntries(asked.map(q => [q, answers.get(q + "-" + r.item)]))}));
  const lines = [fields, ...filled.map(r => fields.map(f => r[f]))];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines.map(l => l.map(cell).join(",")).join("\n")]));
  link.download = "answers-" + name + ".csv";
  link.click();
};
