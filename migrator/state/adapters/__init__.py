"""One adapter for each kind of object that can be registered.

Entry: `base.Adapter`.
Imports: what `state` may import, and nothing else of `state`.
Never here: the registry, which chooses the adapter for an object.
Next of its kind: a module here and a line in the registry's list.
"""
