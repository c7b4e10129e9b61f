{{- define "plaudit.labels" -}}
app.kubernetes.io/name: plaudit
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "plaudit.selector" -}}
app.kubernetes.io/name: plaudit
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- /* Defaults for the pods of jobs, as JSON. */ -}}
{{- define "plaudit.jobDefaults" -}}
{{ merge (deepCopy (.Values.jobDefaults | default dict)) (dict "runAsUser" (int .Values.runAsUser)) | toJson }}
{{- end }}

{{- /* Secrets by which the chart's own pods pull their images. */ -}}
{{- define "plaudit.pullSecrets" -}}
{{- $names := list }}
{{- range concat (list .Values.images.pullSecret) (.Values.imagePullSecrets | default list) }}
{{- with kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") . }}
{{- $names = append $names . }}
{{- end }}
{{- end }}
{{- range uniq $names }}
- name: {{ . | quote }}
{{- end }}
{{- end }}

{{- /* Namespaces that the operator watches, separated by commas; empty: all. */ -}}
{{- define "plaudit.watched" -}}
{{ concat (compact (list .Values.watchNamespace)) (.Values.watchNamespaces | default list) | uniq | join "," }}
{{- end }}

{{- /* The release's name as a Service or an RLJob may have it: no dot, a letter first. */ -}}
{{- define "plaudit.release" -}}
{{- $name := replace "." "-" .Release.Name -}}
{{ regexMatch "^[a-z]" $name | ternary $name (printf "plaudit-%s" $name) }}
{{- end }}

{{- define "plaudit.name" -}}
{{ .Values.nameOverride | default (printf "%s-operator" (include "plaudit.release" .)) | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* Groups of alerts with the thresholds, severities, durations and runbook of the values, without disabled ones. */}}
{{- define "plaudit.alertGroups" -}}
{{- $alerts := .alerts }}
{{- $text := .text }}
{{- range $name, $value := $alerts.thresholds }}
{{- $text = replace (printf "<%s>" $name) (toString $value) $text }}
{{- end }}
{{- $groups := list }}
{{- range ($text | fromYaml).groups }}
{{- $rules := list }}
{{- range .rules }}
{{- $name := .alert | default (splitList " " (.title | default "") | first) }}
{{- if not (has $name $alerts.disabled) }}
{{- $own := .labels.severity }}
{{- $severity := coalesce (get $alerts.severities $name) (get $alerts.severities $own) $own }}
{{- $_ := set .labels "severity" $severity }}
{{- $_ = set .annotations "runbook_url" (replace "metrics/runbook.md" $alerts.runbookUrl .annotations.runbook_url) }}
{{- $rule := . }}
{{- range $field, $durations := dict "for" $alerts.for "keep_firing_for" $alerts.keepFiringFor }}
{{- if hasKey $rule $field }}
{{- $_ = set $rule $field (coalesce (get $durations $name) (get $durations $own) (get $rule $field)) }}
{{- end }}
{{- end }}
{{- $rules = append $rules $rule }}
{{- end }}
{{- end }}
{{- $groups = append $groups (set . "rules" $rules) }}
{{- end }}
{{- toYaml $groups }}
{{- end }}
{{- /* The role that the operator binds to the broker of a job's machines: kind and name. */ -}}
{{- define "plaudit.sandboxesRole" -}}
{{- if include "plaudit.watched" . -}}
Role/{{ include "plaudit.name" . }}-sandboxes
{{- else -}}
ClusterRole/{{ .Release.Namespace }}-{{ include "plaudit.name" . }}-sandboxes
{{- end -}}
{{- end }}
