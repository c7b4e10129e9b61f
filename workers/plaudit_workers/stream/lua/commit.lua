#!lua flags=allow-oom
-- Commits the score of one sample. By: reward worker.
-- ARGV: group, call, sample entry, consumer, index, digest of what was scored, outcome, drop (1: the group must not be
--   trained), seconds since the sample was taken, scoring.
-- Checks: the sample is published and not terminal; the digest is its body's; the phase is open; an outcome other than
--   `scored` comes from the entry's holder (a frozen process that wakes finds all its timers expired).
-- Changes: stores the score, open - 1, and when that is 0 completes the group; acks and deletes the entry, also when it
--   refuses for good.
-- Returns: committed | duplicate | refused; for the same call the same while the group lives (a failure that was refused
--   may be a duplicate by then).
local call, entry, consumer, i, outcome = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[7]
local g = look(i)
if g.ended and g.ended[1] == call then return 'committed' end
if g.ended then
  retire('samples', entry)
  return duplicate('samples', call)
end
if g.phase ~= 'open' or not g.published or g.published[2] ~= ARGV[6] then
  retire('samples', entry)
  return 'refused'
end
local owner, deliveries = holder('samples', entry)
if outcome ~= 'scored' and owner ~= consumer then return 'refused' end
if ARGV[8] == '1' then
  g.drop = true
  redis.call('HSET', group, 'drop', 1)
end
local taken = math.max(tonumber(g.published[4]), now - ARGV[9])
local first = '-'
if g.first and g.first[2] ~= consumer and tonumber(g.first[1]) < taken then
  first = stamp(math.max(tonumber(g.published[4]), g.first[1]))
end
local committed = stamp(math.max(now, taken))
finish(g, i, g.published, {call, outcome, stamp(taken), committed, math.max(deliveries, 1), first}, ARGV[10])
retire('samples', entry)
if g.open == 0 then complete(g) end
return 'committed'
