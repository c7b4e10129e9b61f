#!lua
-- Publishes one finished sample. By: rollout.
-- ARGV: group, call, prompt entry, index, digest, seconds since the prompt was taken, tensors, sample, generation.
-- Checks: the group's phase is open; the index is neither published nor terminal.
-- Changes: stores the body, adds the sample to `samples`, arms the group's deadline with its first sample; acks and
--   deletes the prompt when every index is published or terminal, and when it is refused for good.
-- Returns: published | duplicate | refused; for the same call the same while the group lives.
local call, entry, i, digest = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local g = look(i)
if g.published and g.published[1] == call then return 'published' end
if g.phase ~= 'open' or g.unpublished == 0 then retire('prompts', entry) end
if g.published then return duplicate('prompts', call) end
if g.phase ~= 'open' or g.ended then return 'refused' end
local taken = stamp(math.max(tonumber(g.admitted), now - ARGV[6]))
local sample = redis.call('XADD', prefix .. 'samples', '*', 'sample', id .. ' ' .. i .. ' ' .. digest, 'record',
  ARGV[8])
redis.call('HSET', group, 'tensors:' .. i, ARGV[7], 'sample:' .. i, ARGV[8],
  'published:' .. i, packed({call, digest, taken, now_text, sample}, ARGV[9]), 'unpublished', g.unpublished - 1)
if g.unpublished == g.n then
  redis.call('ZADD', open_groups, stamp(now + g.deadline_s), id)
end
if g.unpublished == 1 then retire('prompts', entry) end
return 'published'
