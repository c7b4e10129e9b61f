#!lua flags=allow-oom
-- Ends the work on an entry that has lost as many workers as is allowed, or cannot be read. By: any consumer.
-- ARGV: group, call, stream, entry, consumer, reason, scoring of a poisoned sample, then (for `groups`) outcome and
--   scoring of each index, as it is without its group-scope scorers.
-- Checks: this consumer holds the entry, and it is there.
-- Changes: copies the entry to `dead`; acks and deletes it. A sample becomes terminal as poison; of a prompt every index
--   that is neither published nor terminal; of a group the scores are replaced. Completes the group where that ends it.
-- Returns: buried | refused; for the same call the same while the group lives.
local call, name, entry, consumer, reason, scoring = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
if redis.call('HGET', group, 'buried:' .. entry) == call then return 'buried' end
local owner, deliveries = holder(name, entry)
if owner ~= consumer then return 'refused' end
local fields = redis.call('XRANGE', prefix .. name, entry, entry)[1]
if not fields then
  retire(name, entry)
  return 'refused'
end
local letter = {'XADD', prefix .. 'dead', 'MAXLEN', '~', 10000, '*', 'stream', name, 'entry', entry, 'reason', reason,
  'consumer', consumer, 'deliveries', deliveries, 'history', redis.call('HGET', group, 'lost:' .. entry) or '',
  'buried', now_text}
for _, field in ipairs(fields[2]) do letter[#letter + 1] = field end
redis.call(unpack(letter))
count('dead:' .. name)
retire(name, entry)
local index = name == 'samples' and tonumber(words(fields[2][2])[2]) or 0
local g = look(index)
local own = name ~= 'samples' or g.published and g.published[5] == entry -- a forged entry ends no sample
if not g.phase or not own then return 'buried' end
redis.call('HSET', group, 'buried:' .. entry, call)
if name == 'groups' and g.phase == 'group_scoring' then regrade(g, ARGV, 8) end
if name == 'groups' or g.phase ~= 'open' then return 'buried' end
for i = index, name == 'samples' and index or g.n - 1 do
  local s = look(i)
  if not s.ended and (name == 'samples' or not s.published) then
    finish(g, i, s.published, {call, 'poison', '-', now_text, math.max(deliveries, 1), '-'}, scoring)
    count('poison')
  end
end
if g.open == 0 then complete(g) end
return 'buried'
