// Tools that run in this page, to watch a model call them. Each returns a string.

const CITIES: Record<string, string> = {
  amsterdam: "Europe/Amsterdam", beijing: "Asia/Shanghai", berlin: "Europe/Berlin", cairo: "Africa/Cairo",
  delhi: "Asia/Kolkata", london: "Europe/London", madrid: "Europe/Madrid", mumbai: "Asia/Kolkata",
  nairobi: "Africa/Nairobi", "new york": "America/New_York", oslo: "Europe/Oslo", paris: "Europe/Paris",
  rome: "Europe/Rome", "san francisco": "America/Los_Angeles", singapore: "Asia/Singapore",
  sydney: "Australia/Sydney", tokyo: "Asia/Tokyo", vienna: "Europe/Vienna",
};

const FACTS: Record<string, string> = {
  "continuous batching": "Requests join and leave the batch at every step; none waits for the whole batch to end.",
  "kv cache": "The keys and values of all tokens so far, kept so that each new token computes only its own.",
  "prefix cache": "KV blocks of a prompt that was seen before are used again instead of being computed.",
  "eiffel tower": "A tower in Paris, 330 metres high, finished in 1889.",
  "everest": "The highest mountain on Earth, 8,849 metres above the sea.",
  "moon": "It is 384,400 km away on average and goes around the Earth in 27.3 days.",
  "octopus": "A sea animal with eight arms, three hearts and blue blood.",
  "photosynthesis": "Plants make sugar and oxygen from water, carbon dioxide and light.",
};

interface ToyTool {
  name: string; description: string; parameter: string; about: string; run: (value: string) => string;
}

export const TOY_TOOLS: ToyTool[] = [
  {
    name: "calculate", description: "Compute an arithmetic expression.",
    parameter: "expression", about: "The expression, such as (3 + 4) * 2", run: calculate,
  },
  {
    name: "get_weather", description: "Get the current weather in a city.",
    parameter: "city", about: "The name of the city", run: weather,
  },
  {
    name: "get_time", description: "Get the current time in a city.",
    parameter: "city", about: "The name of the city", run: timeOfDay,
  },
  {
    name: "lookup", description: "Look something up.",
    parameter: "query", about: "What to look up", run: lookup,
  },
];

/** The tool in the format of a request. */
export function described({ name, description, parameter, about }: ToyTool) {
  const properties = { [parameter]: { type: "string", description: about } };
  const parameters = { type: "object", properties, required: [parameter] };
  return { type: "function", function: { name, description, parameters } };
}

/** Run a tool call and return its result. The model may call anything, with any arguments. */
export function resultOf(name: string, text: string): string {
  try {
    const tool = TOY_TOOLS.find((tool) => tool.name === name);
    if (!tool) throw new Error("there is no tool " + name);
    const value = JSON.parse(text)?.[tool.parameter];
    if (typeof value !== "string" && typeof value !== "number") throw new Error(tool.parameter + " is missing");
    return tool.run(String(value).trim());
  } catch (error) {
    return "Error: " + (error as Error).message;
  }
}

// A recursive-descent parser for numbers, + - * / % ^ and parentheses.
function calculate(expression: string): string {
  const tokens = expression.replaceAll("**", "^").match(/\d+(?:\.\d+)?|\.\d+|\S/g) ?? [];
  const next = (...signs: string[]) => (signs.includes(tokens[0] ?? "") ? tokens.shift() : undefined);
  const fail = (): never => { throw new Error("cannot compute " + expression); };
  const sum = (): number => {
    let value = product();
    for (let sign: string | undefined; (sign = next("+", "-", "−"));) value = sign === "+" ? value + product() : value - product();
    return value;
  };
  const product = (): number => {
    let value = signed();
    for (let sign: string | undefined; (sign = next("*", "×", "/", "÷", "%"));) {
      const other = signed();
      value = "*×".includes(sign) ? value * other : sign === "%" ? value % other : value / other;
    }
    return value;
  };
  const signed = (): number => (next("-", "−") ? -signed() : power());
  const power = (): number => {
    const base = single();
    return next("^") ? base ** signed() : base;
  };
  const single = (): number => {
    if (next("(")) {
      const value = sum();
      return next(")") ? value : fail();
    }
    const value = Number(tokens.shift() ?? NaN);
    return Number.isNaN(value) ? fail() : value;
  };
  const value = sum();
  if (tokens.length || !Number.isFinite(value)) fail();
  return String(Number(value.toPrecision(12)));
}

// Made up, but constant for a city.
function weather(city: string): string {
  let hash = 2166136261;
  for (const letter of city.toLowerCase()) hash = Math.imul(hash ^ letter.codePointAt(0)!, 16777619) >>> 0;
  const sky = ["sunny", "cloudy", "rainy", "windy", "foggy", "clear"][hash % 6];
  return `${sky}, ${(hash >>> 8) % 30} °C`;
}

function timeOfDay(city: string): string {
  const zone = CITIES[city.toLowerCase().split(",")[0]!];
  const time = new Date().toLocaleTimeString("en-GB", { timeZone: zone ?? "UTC", hour: "2-digit", minute: "2-digit" });
  return zone ? time : `${time} UTC (the time zone of ${city} is unknown)`;
}

function lookup(query: string): string {
  const topic = Object.keys(FACTS).find((name) => query.toLowerCase().includes(name));
  return topic ? FACTS[topic]! : "Nothing was found about " + query;
}
