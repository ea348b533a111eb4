# Everything here is `python -m book …`; make only saves typing. Python 3.11+ is all that must be there.
PYTHON ?= python3
BOOK = $(PYTHON) -m book
RUN = $(shell test -x .venv/bin/python && echo .venv/bin/python || echo $(PYTHON)) -m book

.PHONY: help site serve test gpu measure status contract chapter import clean
help:            ## what there is
	@$(BOOK) --help
site:            ## contract, currency of records, strict build into site/ (STALE=show marks what is stale)
	@$(BOOK) site
serve:           ## live preview
	@$(BOOK) serve
test:            ## every CPU test and example, browser tests where a Chromium is found
	@$(BOOK) test
gpu:             ## prove and measure what is stale on this machine's GPU (ARGS="--all --out DIR --budget MIN")
	@$(RUN) gpu $(ARGS)
measure:         ## measure what this machine can run (ARGS="part/name --all")
	@$(RUN) measure $(ARGS)
status:          ## chapters, snippets, stale and unverified items (ARGS="--json --bench")
	@$(BOOK) status $(ARGS)
contract:        ## the contract test alone
	@$(BOOK) contract
chapter:         ## start one: make chapter NAME=part/name
	@$(BOOK) chapter $(NAME)
import:          ## lay an archive into records/: make import FILE=records.tar.gz
	@$(BOOK) import $(FILE)
clean:           ## remove what was built
	rm -rf site
