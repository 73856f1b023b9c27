"""`dpbench report`: runs on one page, which needs nothing beside itself."""
