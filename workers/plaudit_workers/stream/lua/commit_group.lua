#!lua flags=allow-oom
-- Commits the result of a group's group-scope scorers. By: reward worker.
-- ARGV: group, call, group entry, consumer, digests of all bodies (one word each, - for none), drop (1: the group must
--   not be trained), then outcome and scoring of each index.
-- Checks: the phase is group_scoring; the digests are the bodies'; a sample loses its score only by the entry's holder.
-- Changes: replaces the scores and completes the group; acks and deletes the entry, also when it refuses for good.
-- Returns: committed | duplicate | refused; for the same call the same while the group lives.
local call, entry, consumer = ARGV[2], ARGV[3], ARGV[4]
local g = look(0)
local graded = redis.call('HGET', group, 'graded')
if graded == call then return 'committed' end
if g.phase ~= 'group_scoring' then
  retire('groups', entry)
  if graded then return duplicate('groups', call) end
  return 'refused'
end
local digests, loses = words(ARGV[5]), false
for i = 0, g.n - 1 do
  local f = redis.call('HMGET', group, 'published:' .. i, 'ended:' .. i)
  if (f[1] and unpacked(f[1])[2] or '-') ~= digests[i + 1] then
    retire('groups', entry)
    return 'refused'
  end
  loses = loses or unpacked(f[2])[2] == 'scored' and ARGV[7 + 2 * i] ~= 'scored'
end
if loses and holder('groups', entry) ~= consumer then return 'refused' end
redis.call('HSET', group, 'graded', call)
if ARGV[6] == '1' then g.drop = true end
retire('groups', entry)
regrade(g, ARGV, 7)
return 'committed'
