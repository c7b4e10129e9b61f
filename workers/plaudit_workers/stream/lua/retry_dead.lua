#!lua flags=allow-oom
-- Puts a dead letter back into its stream. By: a person (`plaudit dead retry`).
-- ARGV: group, call, letter (its id in `dead`).
-- Checks: the letter is there, and of this group; the group's phase is open; what ended with the letter's burial is still
--   as the burial left it.
-- Changes: takes back the poison of its sample, or of each index of its prompt; adds the entry to its stream anew, so that
--   it has all its deliveries again; deletes the letter.
-- Returns: retried | unknown | ended (the group has); for the same call the same while the group lives.
local call, letter = ARGV[2], ARGV[3]
if redis.call('HGET', group, 'retried:' .. letter) == call then return 'retried' end
local found, f = redis.call('XRANGE', prefix .. 'dead', letter, letter)[1], {}
if not found then return 'unknown' end
for i = 1, #found[2], 2 do f[found[2][i]] = found[2][i + 1] end
local about = words(f.group or f.sample or '')
if about[1] ~= id or about[2] and not tonumber(about[2]) then return 'unknown' end
local g = look(0)
if g.phase ~= 'open' or f.stream == 'groups' then return 'ended' end
local burial, back = redis.call('HGET', group, 'buried:' .. f.entry), {}
for i = about[2] or 0, about[2] or g.n - 1 do
  local s = look(i)
  if s.ended and s.ended[1] == burial and s.ended[2] == 'poison' then back[#back + 1] = {i, s.published} end
end
if #back == 0 then return 'ended' end
local entry = {'XADD', prefix .. f.stream, '*', f.sample and 'sample' or 'group', f.sample or f.group, 'record', f.record}
entry[#entry + 1], entry[#entry + 2] = 'retried', letter -- samples of a prompt may be published already
local again = redis.call(unpack(entry))
for _, one in ipairs(back) do
  local i, published = one[1], one[2]
  redis.call('HDEL', group, 'ended:' .. i)
  redis.call('HINCRBY', group, 'open', 1)
  if f.stream == 'samples' then
    published[5] = again
    redis.call('HSET', group, 'published:' .. i, packed(published, published.record))
  else
    redis.call('HINCRBY', group, 'unpublished', 1)
    redis.call('HSET', group, 'prompt_entry', again)
  end
end
count('poison', -#back)
count('retried:' .. f.stream)
redis.call('HSET', group, 'retried:' .. letter, call)
redis.call('XDEL', prefix .. 'dead', letter)
return 'retried'
