#!lua flags=allow-oom
-- Notes that a consumer begins to work on an entry and on nothing else: if it is lost now, the entry is to blame.
-- By: any consumer, for the last suspect of a batch.
-- ARGV: group, stream, entry, consumer. Checks: the consumer holds the entry. Returns: nothing.
if holder(ARGV[2], ARGV[3]) == ARGV[4] then note_isolated(id, ARGV[3], ARGV[4]) end
return false
