"""Reports of records: gains and losses, changes between two of them, and all of it on one page."""
