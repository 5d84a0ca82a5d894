// Sphinx's own scores, but what stands behind a room comes after what its users call.
const Scorer = {
  score: ([page, title, anchor, about, score]) => (page.includes("/behind_") ? score - 20 : score),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
