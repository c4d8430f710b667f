"""Configuration: from the text of a run file to a frozen tree, in the order of reading:

`yaml_tree` YAML with line numbers, `layers` files and command line merged, `run`, `cluster` and `engine` the keys,
`load` all of it together, `rules/` what must hold beyond one key, `messages` the text of problems. `schema`, `derived`,
`topology` and `render` answer questions about a configuration.
"""
