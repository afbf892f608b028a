{{- define "windrow.labels" -}}
{{ include "windrow.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "windrow.selector" -}}
app.kubernetes.io/name: windrow-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Of the endpoint with OpenAI's calls, which the operator's Service does not select. */ -}}
{{- define "windrow.apiLabels" -}}
{{ include "windrow.apiSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "windrow.apiSelector" -}}
app.kubernetes.io/name: windrow-api
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "windrow.image" -}}
{{- $repository := required "image.repository: name the operator's image as you have pushed it; `make images` builds it, and nobody publishes one for you (docs/operations/install.md)" .Values.image.repository -}}
{{- with .Values.global.imageRegistry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $repository -}}
{{- with .Values.image.digest -}}
@{{ . }}
{{- else -}}
:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- /* The chart's Secrets of the registry, and those of charts around it, which may be plain names. */ -}}
{{- define "windrow.pullSecrets" -}}
{{- $found := list }}
{{- range concat (.Values.imagePullSecrets | default list) (.Values.global.imagePullSecrets | default list) }}
{{- $found = append $found (kindIs "string" . | ternary (dict "name" .) .) }}
{{- end }}
{{- with uniq $found }}{{ toYaml . }}{{ end }}
{{- end }}

{{- /* What the strictest Pod Security level asks of a container. */ -}}
{{- define "windrow.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* OpenShift gives each namespace users of its own, and admits no other. */ -}}
{{- define "windrow.podSecurityContext" -}}
{{- $context := .Values.podSecurityContext }}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- $context = omit $context "runAsUser" "runAsGroup" "fsGroup" }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{- /*
Values that came after a release that is upgraded with its own (--reuse-values): Helm takes those in place of
values.yaml. Each template includes this first. What a user empties (null) below a free map stays so.
*/ -}}
{{- define "windrow.defaults" -}}
{{- $defaults := .Files.Get "files/values.yaml" | fromYaml }}
{{- $_ := set . "Values" (.Values | default dict) }}
{{- include "windrow.fill" (list .Values $defaults) }}
{{- end }}

{{- define "windrow.fill" -}}
{{- $values := index . 0 }}
{{- range $name, $default := index . 1 }}
{{- if not (hasKey $values $name) }}
{{- $_ := set $values $name $default }}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $values $name)) }}
{{- if not (has $name (list "resources" "jobTemplate" "podSecurityContext" "labels" "annotations" "nodeSelector" "affinity")) }}
{{- include "windrow.fill" (list (get $values $name) $default) }}
{{- end }}
{{- else if kindIs "invalid" (get $values $name) }}
{{- $_ := set $values $name $default }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Of what the uninstall hooks need, made before both of them and gone after; its weight is given. */ -}}
{{- define "windrow.uninstallHook" -}}
helm.sh/hook: pre-delete,post-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
