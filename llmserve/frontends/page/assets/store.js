// What the browser keeps: looks for good, conversation, settings and the API key for as long as the tab is open.

const PREFIX = "llmserve.";

function kept(storage) {
  return {
    get(name, otherwise = null) {
      try {
        const text = storage().getItem(PREFIX + name);
        return text === null ? otherwise : JSON.parse(text);
      } catch {
        return otherwise; // a browser that keeps nothing, or something else under that name
      }
    },
    set(name, value) {
      try {
        if (value === null) storage().removeItem(PREFIX + name);
        else storage().setItem(PREFIX + name, JSON.stringify(value));
      } catch {
        // full, or not allowed: then it lasts until the page is left
      }
    },
  };
}

export const forGood = kept(() => localStorage);
export const forThisTab = kept(() => sessionStorage);
