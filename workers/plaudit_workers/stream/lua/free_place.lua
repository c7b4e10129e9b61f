#!lua flags=allow-oom
-- Frees the place of a machine that is gone. By: sandboxes.
-- ARGV: '', broker, holder, machine.
-- Checks: no later broker; the place is that machine's.
-- Changes: `sandboxes`. Returns: freed | stale.
if redis.call('HGET', prefix .. 'sandboxes:broker', 'name') ~= ARGV[2] then return 'stale' end
local places = prefix .. 'sandboxes'
if redis.call('HGET', places, ARGV[3]) == ARGV[4] then redis.call('HDEL', places, ARGV[3]) end
return 'freed'
