"""Configuration: from the text of a run file to a frozen tree, in the order of reading:

`source` YAML with line numbers, `layers` files and command line merged, `run` the keys, `load` all of it together,
`rules` and `files` what must hold beyond one key, `messages` the text of problems. `schema`, `derived`, `render` and
`report` serve those who ask about a configuration.
"""
