-- Put before all transitions: the sessions of clients that submit samples to a scoring service.
--
-- sessions (sorted set): names, by when they expire. Of each session:
--   session:<name> (hash): epoch, opened (the call that set it), keep_s.
--   session:<owner>:waiting (sorted set): its owner's sessions that were refused for want of room, by when.
-- in_work (hash): samples without a result. The owner of a/b and a/c is a: names within one token of a gateway; other
--   sessions are their own owners. <owner>: of all its sessions; <owner>/: of those with names; <owner>/<name>: of one;
--   <owner>?: when one of them was refused last for want of room.
--   session:<name>:groups (hash): submitted and not acknowledged: group -> "digest entry", entry of its results or -.
--   session:<name>:results (stream): an entry a group that has ended, until the client acknowledges it.
--   session:<name>:returned (sorted set): the groups acknowledged last.

local function session_key(name, part)
  return prefix .. 'session:' .. name .. (part and ':' .. part or '')
end

local function owner_of(session)
  return string.match(session, '^[^/]*')
end

-- Counts samples that a session has in work, also for its owner.
local function count_in_work(session, by)
  local owner = owner_of(session)
  for _, field in ipairs(session == owner and {owner} or {session, owner .. '/', owner}) do
    if redis.call('HINCRBY', prefix .. 'in_work', field, by) <= 0 then
      redis.call('HDEL', prefix .. 'in_work', field, field .. '?')
    end
  end
end

-- What takes room for n samples of a session, and says whether there was any: its owner's sessions share one bound, in
-- equal parts among those that were refused within the last second. A group that alone exceeds the part may be in work
-- alone.
local function room_of(session, most)
  local owner = owner_of(session)
  local f = redis.call('HMGET', prefix .. 'in_work', owner, owner .. '/', owner .. '?', session)
  local all, sharing = tonumber(f[1] or 0), 1
  local own = session == owner and all - tonumber(f[2] or 0) or tonumber(f[4] or 0)
  local waiting = session_key(owner, 'waiting')
  if math.abs(now - tonumber(f[3] or 0)) <= 1 then
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', waiting, stamp(now - 1), stamp(now + 1))) do
      if other ~= session then sharing = sharing + 1 end
    end
  end
  local part = most / sharing
  return function(n)
    local fits = own > 0 and own + n <= part and all + n <= most
      or own <= 0 and (all <= 0 or all + math.min(n, part) <= most)
    if fits then
      own, all = own + n, all + n
    elseif session ~= owner or all > own then
      redis.call('HSET', prefix .. 'in_work', owner .. '?', now_text)
      redis.call('ZADD', waiting, now_text, session)
      redis.call('EXPIRE', waiting, 10)
    end
    return fits
  end
end

-- The session goes on to be kept from now on.
local function touch(name)
  redis.call('ZADD', sessions, stamp(now + redis.call('HGET', session_key(name), 'keep_s')), name)
end

-- Why a client has no say: `stale`, a later one goes by the session's name; `unknown`, the session was lost or has
-- expired: open it again. False when it has, and then whether the session is shared.
local function refusal(name, epoch)
  local f = redis.call('HMGET', session_key(name), 'epoch', 'opened')
  local stored = tonumber(f[1] or 0)
  if stored == 0 then return 'unknown' end
  if stored > tonumber(epoch) then return 'stale' end
  if stored < tonumber(epoch) then redis.call('HSET', session_key(name), 'epoch', epoch) end
  return false, f[2] == 'shared'
end
