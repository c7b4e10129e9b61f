#!lua flags=allow-oom
-- Makes a process the one broker of the run's machines, or keeps it so. By: sandboxes, at its start and every few seconds.
-- ARGV: '', broker, seconds (of its lease; 0 ends it).
-- Checks: no other broker's lease holds.
-- Changes: `sandboxes:broker`.
-- Returns: new | kept | taken; `new` also where Redis has lost what it knew.
local key = prefix .. 'sandboxes:broker'
local holder = redis.call('HMGET', key, 'name', 'until')
local own = holder[1] == ARGV[2]
if holder[1] and not own and tonumber(holder[2]) > now then return 'taken' end
redis.call('HSET', key, 'name', ARGV[2], 'until', stamp(now + ARGV[3]))
return own and 'kept' or 'new'
