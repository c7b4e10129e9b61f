#!lua flags=allow-oom
-- Takes groups that are ready. By: trainer. Not a plain XREADGROUP, for a trainer that was replaced must take nothing.
-- ARGV: '', incarnation, count, an entry: it holds all that it was given up to this one.
-- Checks: no later trainer. Changes: entries of `ready` become pending for the trainer, and stay so until `close`.
-- Returns: {entry, group, n} of at most `count` after that entry, those taken before (by a trainer that died, or in a reply
--   that was lost) first; or 'stale'.
if stale(ARGV[2]) then return 'stale' end
local stream, wanted, taken = prefix .. 'ready', tonumber(ARGV[3]), {}

local function take(entry, group_id)
  local n = redis.call('HGET', prefix .. 'group:' .. group_id, 'n')
  if n then taken[#taken + 1] = {entry, group_id, tonumber(n)} else retire('ready', entry) end
end

local pending = redis.call('XPENDING', stream, 'trainer', '(' .. ARGV[4], '+', wanted)
for _, entry in ipairs(pending) do
  local found = redis.call('XRANGE', stream, entry[1], entry[1])
  if found[1] then take(entry[1], found[1][2][2]) else redis.call('XACK', stream, 'trainer', entry[1]) end
end
if #pending < wanted then -- else there may be more of them, which come first
  local new = redis.call('XREADGROUP', 'GROUP', 'trainer', 'trainer', 'COUNT', wanted - #taken, 'STREAMS', stream, '>')
  for _, entry in ipairs(new and new[1][2] or {}) do take(entry[1], entry[2][2]) end
end
return taken
