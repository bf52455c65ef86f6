"""The mathematics of the memory: rules, writes, forms. Imports torch only."""
