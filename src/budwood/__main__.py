"""`python -m budwood` is `budwood`."""

from budwood.cli.main import main

main()
