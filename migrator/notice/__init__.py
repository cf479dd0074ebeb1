"""How this process learns that its pod must leave (signal file, SIGTERM), and which process answers the hook.

Entry: `inbox.NoticeInbox`, which holds the SIGTERM handler and the `watcher.Watcher`.
Imports: the leaves and `platform`. `import migrator; migrator.watch()` must work without torch.
Never here: what is done about a notice.
Next of its kind: another source of notices is a module here that the watcher asks.
"""
