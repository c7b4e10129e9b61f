#!lua flags=allow-oom
-- Gives a sample or a pool a place for a machine. By: sandboxes.
-- ARGV: group (empty: a pool), broker, holder, machine, most, sample's index, warm (holder whose machine it takes; empty:
--   a new one).
-- Checks: no later broker; the sample's group lives and awaits it; the sample has no other machine; fewer than `most`
--   places are held, or it takes a warm one.
-- Changes: `sandboxes` (holder to machine).
-- Returns: held | full | ended | gone (of the warm one) | stale.
local broker, holder, machine, warm = ARGV[2], ARGV[3], ARGV[4], ARGV[7]
local places = prefix .. 'sandboxes'
if redis.call('HGET', prefix .. 'sandboxes:broker', 'name') ~= broker then return 'stale' end
local held = redis.call('HGET', places, holder)
if held == machine then return 'held' end
if id ~= '' then
  local known = redis.call('HMGET', group, 'phase', 'published:' .. ARGV[6], 'ended:' .. ARGV[6])
  if known[1] ~= 'open' or known[2] or known[3] then return 'ended' end
end
if held then return 'full' end
if warm ~= '' then
  if redis.call('HDEL', places, warm) == 0 then return 'gone' end
elseif redis.call('HLEN', places) >= tonumber(ARGV[5]) then
  return 'full'
end
redis.call('HSET', places, holder, machine)
return 'held'
