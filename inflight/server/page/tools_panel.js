// Switches for the toy tools that the model may call.

const TOOLS_NOTE = "They run in this page, and their results are sent to the model. The weather is made up.";

function showTools() {
  for (const { name, description } of TOY_TOOLS) {
    const label = element("label", "", " " + name), box = document.createElement("input");
    box.type = "checkbox";
    box.value = name;
    box.onchange = countTools;
    label.title = description;
    label.prepend(box);
    $("tools-list").append(label);
  }
}

const toolBoxes = () => [...$("tools-list").querySelectorAll("input")];
const isOn = (box) => box.checked && !box.disabled;

function chosenTools() {
  const names = toolBoxes().filter(isOn).map((box) => box.value);
  return TOY_TOOLS.filter((tool) => names.includes(tool.name)).map(described);
}

function countTools() {
  const number = toolBoxes().filter(isOn).length;
  $("tools-on").textContent = number ? ` · ${number} on` : "";
}

// Enables the switches, or disables them and shows the reason.
function allowTools(refusal = "") {
  $("tools-note").textContent = refusal ? "This model cannot call tools: " + refusal : TOOLS_NOTE;
  $("tools-note").classList.toggle("error", Boolean(refusal));
  for (const box of toolBoxes()) box.disabled = Boolean(refusal);
  countTools();
}
