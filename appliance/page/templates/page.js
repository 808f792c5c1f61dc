'use strict';
(() => {
  const tip = document.createElement('div');
  tip.id = 'tip'; tip.hidden = true; document.body.append(tip);
  const ns = 'http://www.w3.org/2000/svg';
  const text = v => v === null ? '–' : v === 0 ? '0' :
    Math.abs(v) < 1e-3 ? v.toExponential(2) : Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString('en') :
    String(+v.toPrecision(4));
  const time = s => {
    s = Math.round(s); const h = Math.floor(s / 3600), m = Math.floor(s % 3600 / 60);
    return h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
  };
  for (const svg of document.querySelectorAll('svg[data-hover]')) {
    const data = JSON.parse(svg.dataset.hover), box = svg.viewBox.baseVal;
    const line = document.createElementNS(ns, 'line');
    line.setAttribute('class', 'pointer'); line.setAttribute('y1', 0); line.setAttribute('y2', box.height - 30);
    line.style.display = 'none'; svg.append(line);
    const [low, high] = data.range, [start, end] = data.places;
    const at = x => start + (x - low) / (high - low) * (end - start);
    svg.addEventListener('pointermove', event => {
      const rect = svg.getBoundingClientRect();
      const value = low + ((event.clientX - rect.left) / rect.width * box.width - start) / (end - start) * (high - low);
      let near = 0;
      data.xs.forEach((x, i) => { if (Math.abs(x - value) < Math.abs(data.xs[near] - value)) near = i; });
      const x = data.xs[near], place = at(x);
      line.setAttribute('x1', place); line.setAttribute('x2', place); line.style.display = '';
      const rows = data.columns.filter(c => c.ys[near] !== null).map(c => {
        const row = document.createElement('div'), dot = document.createElement('i'), b = document.createElement('b');
        dot.style.background = `var(--c${c.colour})`; b.textContent = text(c.ys[near]);
        row.append(dot, `${c.name} `, b); return row;
      });
      tip.replaceChildren(data.time ? time(x) : `step ${x}`, ...rows);
      tip.hidden = false;
      const over = rect.left + place / box.width * rect.width, width = tip.offsetWidth;
      tip.style.left = `${Math.max(4, over + 14 + width > innerWidth ? over - width - 14 : over + 14)}px`;
      tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 12)}px`;
    });
    svg.addEventListener('pointerleave', () => { tip.hidden = true; line.style.display = 'none'; });
  }
  const key = 'open:' + location.pathname, folds = [...document.querySelectorAll('details[id]')];
  try {
    const open = JSON.parse(sessionStorage.getItem(key) || 'null');
    if (open) folds.forEach(fold => { fold.open = open.includes(fold.id); });
  } catch { /* storage is off: they start closed */ }
  const every = Number(document.body.dataset.reloadS || 0);
  if (!every) return;
  document.getElementById('forsaken').hidden = Date.now() / 1000 - Number(document.body.dataset.written) < 300;
  const again = () => {
    if (document.hidden || !tip.hidden || String(getSelection())) return setTimeout(again, 1000);
    try {
      sessionStorage.setItem(key, JSON.stringify(folds.filter(f => f.open).map(f => f.id)));
    } catch { /* as above */ }
    location.reload();
  };
  setTimeout(again, every * 1000);
})();
