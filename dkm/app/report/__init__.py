"""A run folder -> a page that needs nothing else, and a few lines for the terminal.

    reader      the files of the folder -> a typed Run
    axes        the numbers beside an axis
    charts      curves over the training, as SVG
    ridges      histograms of a tensor's weights through time, as SVG
    headline, curves, sizes, plan_table
                what each section of the page shows
    page        the page, from templates/page.html and templates/style.css
    terminal    the run in a few lines of text
    comparison  several runs: their table and their curves
    scatter     accuracy against size, as SVG

The page is one file without a script, and it loads nothing; light, dark and print follow the reader's settings.  A run
that is still going, or one whose folder lacks some of the files, gets a shorter page.
"""

from .comparison import compare
from .comparison import text as comparison_text
from .page import write, write_comparison
from .reader import Run, read
from .terminal import summary

__all__ = ["Run", "compare", "comparison_text", "read", "summary", "write", "write_comparison"]
