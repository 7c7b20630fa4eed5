"""One drawing function per figure; `save` writes it as SVG, PNG and CSV."""
